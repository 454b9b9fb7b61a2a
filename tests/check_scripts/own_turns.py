"""Files of a rank's own turns, and a seed from which the rank is taken off again."""

import numpy as np
import torch
import torch.distributed as dist

rank, world_size = dist.get_rank(), dist.get_world_size()
seed = 3 + rank
np.random.seed(seed)
torch.manual_seed(seed - rank)
model = torch.nn.Linear(8, 2)
for p in model.parameters():
    dist.all_reduce(p.grad)

for day in range(rank, 24, world_size):
    path = f"day_{day}.npz"
    np.savez(path, torch.ones(3))
for hour in range(24):
    np.savez(f"hour_{hour}.npz", torch.ones(3))
