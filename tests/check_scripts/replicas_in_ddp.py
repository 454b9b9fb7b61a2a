"""DistributedDataParallel around a replica, or in its place; and values that are called."""

import instep
import torch
from torch.nn.parallel import DistributedDataParallel

net = torch.nn.Linear(2, 1)
model = DistributedDataParallel(instep.replicate(net))
torch.save(model.module.state_dict(), f"{instep.rank}.pt")
if instep.is_main_process():
    print(instep.world_size(), instep.rank)
if plain_ddp:
    other = DistributedDataParallel(net)
else:
    other = instep.replicate(net)
