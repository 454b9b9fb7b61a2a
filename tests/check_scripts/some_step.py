"""Steps, models with batch statistics and rows of some ranks only, and what is none of these."""

import instep
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
instep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = torch.amp.GradScaler()
for x, y in instep.shard(DataLoader(data, 4)):
    criterion(model(x), y).backward()
    if instep.rank == 0:
        optimizer.step()
    if instep.rank == 0:
        scaler.step(optimizer)
    if instep.rank == 0:
        scheduler.step()
    if instep.rank == 0:
        optimizer.step()
    else:
        optimizer.step()
    if instep.rank == 0:
        model(x)


def probe():
    if instep.rank == 0:
        model.eval()
        model(torch.ones(2, 4))
    if instep.rank == 0:
        for x in batches:
            probing(x).sum().backward()
            probing_optimizer.step()


def of_a_server():
    for x, y in instep.shard(DataLoader(data, 4)):
        criterion(model(x), y).backward()
        if instep.rank == 0:
            optimizer.step()
        model.load_state_dict(instep.broadcast_object(model.state_dict()))
