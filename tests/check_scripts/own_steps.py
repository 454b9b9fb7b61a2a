"""Steps, ends and learning rates that a rank's own rows decide; and some that all ranks decide."""

import instep
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

train_loader = instep.shard(make_loader())


def by_own_rows(model):
    for epoch in range(9):
        total = 0.0
        for x, y in train_loader:
            loss = loss_of(model(x), y)
            if torch.isnan(loss):
                continue
            if len(x) < 8:
                continue
            loss.backward()
            total += loss.item()
        if total < 1:
            break


def by_numbers_of_steps(model):
    steps = 0
    for epoch in range(9):
        for i, (x, y) in tqdm(enumerate(train_loader)):
            if i >= 10:
                break
            if isinstance(x, str):
                continue
            loss_of(model(x), y).backward()
            steps += 1
            if steps >= 20:
                break
        if steps >= 20:
            break


def by_the_mean(model):
    for x, y in train_loader:
        loss = loss_of(model(x), y)
        if instep.all_reduce(loss.detach(), "mean") > 10:
            continue
        loss.backward()


def by_a_counter_in_an_object(state):
    for state.batch, (x, y) in enumerate(train_loader):
        if state.batch >= state.limit:
            break
        loss_of(state.model(x), y).backward()


def without_training(model):
    for x, y in train_loader:
        if model(x).sum() > 10:
            break


def with_a_distributed_sampler(net):
    model, sampler = DistributedDataParallel(net), DistributedSampler(data)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in DataLoader(data, 4, sampler=sampler):
            loss = loss_of(model(x), y)
            loss.backward()
            total += loss.item()
        if total < 1:
            break


def rate_by_own_rows(net, optimizer):
    model, plateau = DistributedDataParallel(net), ReduceLROnPlateau(optimizer)
    sampler = DistributedSampler(data)
    loader, whole = DataLoader(data, 4, sampler=sampler), DataLoader(data, 4)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        plateau.step(mean_loss(model, loader))
        plateau.step(loss_of_either(model, loader) + loss_of_either(model, whole))


def mean_loss(model, loader):
    total = 0.0
    for x, y in loader:
        total += loss_of(model(x), y).item()
    return total / len(loader)


def loss_of_either(model, either):
    total = 0.0
    for x, y in either:
        total += loss_of(model(x), y).item()
    return total
