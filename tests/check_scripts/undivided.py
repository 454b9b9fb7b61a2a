"""Models in DistributedDataParallel, and the samples on which each rank trains them."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import others


class Numbers(Dataset):
    def __getitem__(self, index):
        return torch.tensor([float(index)])


class OwnNumbers(Dataset):
    def __getitem__(self, index):
        return torch.tensor([float(index + self.rank)])


def run(net, rank, world_size, inputs):
    model = DDP(net)
    loader = DataLoader(Numbers(), 8)
    for x in loader:
        model(x).sum().backward()
    data = TensorDataset(inputs)
    for (x,) in DataLoader(data, 8, shuffle=True):
        model(x).sum().backward()
    for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
        model(x).sum().backward()
    for (x,) in DataLoader(data, 8, sampler=others.Sampler(data)):
        model(x).sum().backward()
    for (x,) in DataLoader(Subset(data, range(rank, 100, world_size)), 8):
        model(x).sum().backward()
    for x in DataLoader(OwnNumbers(), 8):
        model(x).sum().backward()
    for x in DataLoader(others.Data(), 8):
        model(x).sum().backward()
    for (x,) in DataLoader(data, 8):
        net(x).sum().backward()
    for (x,) in DataLoader(data, 8):
        model(x).sum()
