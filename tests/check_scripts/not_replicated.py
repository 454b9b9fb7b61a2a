"""instep.shard without instep.replicate, where the model is visibly trained, and where not."""

import instep
import torch
from torch import nn
from torch.utils.data import DataLoader

from others import build_model

loader = instep.shard(DataLoader(data, 4))
model, criterion = nn.Sequential(nn.Linear(2, 1)), nn.MSELoss()
for x, y in loader:
    criterion(model(x), y).backward()
imported = build_model()
for x, y in loader:
    criterion(imported(x), y).backward()
for x, y in DataLoader(data, 4):
    criterion(model(x), y).backward()
with torch.no_grad():
    for x, y in loader:
        criterion(model(x), y)
