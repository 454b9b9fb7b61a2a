"""The two lines, one of them forgotten; metrics and schedules of own rows, and of all."""

import instep
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def forward(self, x):
        return x


data = TensorDataset(torch.randn(8, 2), torch.randn(8))


def without_shard(net):
    model, loader = instep.replicate(net), DataLoader(data, 4)
    for x, y in loader:
        model(x).sum().backward()
    instep.replicate(net)
    for x, y in DataLoader(data, 4):
        net(x).sum().backward()


def with_a_shard_of_each_batch(net):
    model = instep.replicate(net)
    for batch in DataLoader(data, 4):
        x, y = instep.shard(batch)
        model(x).sum().backward()


def of_own_rows(model, optimizer):
    plateau = ReduceLROnPlateau(optimizer)
    correct = seen = 0
    total = 0.0
    loader = instep.shard(DataLoader(data, 4))
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
        seen += len(x)
        loss = model(x).sum()
        total += loss.item()
    print(f"{100 * correct / seen:.1f}")
    plateau.step(total / len(loader))
    plateau.step(loss.item())
    plateau.step(loss_of(model, loader))
    plateau.step(mean_of_all(model, loader))
    print(seen / 8)


def loss_of(model, loader):
    total = 0.0
    for x, y in instep.shard(loader):
        total += model(x).sum().item()
    return total


def mean_of_all(model, loader):
    mean = instep.Mean()
    for x, y in instep.shard(loader):
        mean.update(model(x).mean(), len(x))
        value = mean.compute()
    return value


def of_all_rows(model, scheduler):
    correct = seen = 0
    for x, y in instep.shard(DataLoader(data, 4)):
        correct += (model(x).argmax(1) == y).sum()
        seen += len(x)
    correct, seen = instep.all_reduce(torch.tensor([correct, seen]))
    scheduler.step(correct / seen)
