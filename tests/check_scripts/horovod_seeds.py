"""Horovod: a seed of each rank's own before the model, which nothing makes equal again."""

import horovod.torch as hvd
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)


hvd.init()
torch.manual_seed(1 + hvd.rank())
model = Net()
torch.manual_seed(2 + hvd.rank())
loss_function = nn.CrossEntropyLoss()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
