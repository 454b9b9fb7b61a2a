"""Values that come from themselves, in a loop."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model, x, loader):
    for _ in range(2):
        model = DistributedDataParallel(model)
        x = x.to("cpu")
        nn.MSELoss()(model(x), x)
    for x, y in loader:
        y = y.float()
        nn.functional.mse_loss(model(x), y).backward()
