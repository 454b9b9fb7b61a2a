"""What a script for DistributedDataParallel keeps when two lines of instep take its place."""

import instep
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

model = instep.replicate(torch.nn.Linear(2, 1))
sampler = DistributedSampler(data)
whole = instep.shard(DataLoader(data, 64, shuffle=True))
lr = 0.1 * instep.world_size
own = DataLoader(data, 64, sampler=sampler)
twice = instep.shard(DataLoader(data, 64, sampler=sampler))
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for epoch in range(9):
    sampler.set_epoch(epoch)
    for x, y in own:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole.set_epoch(epoch)
    state = model.module.state_dict()
    if hasattr(model, "module"):
        state = model.module.state_dict()
    steps = len(whole) // instep.world_size
    state = (model.module if isinstance(model, DistributedDataParallel) else model).state_dict()
