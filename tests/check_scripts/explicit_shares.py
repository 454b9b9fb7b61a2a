"""Sums over instep.shard(loader), divided by the length of the whole data set, and others."""

import instep
from torch.utils.data import DataLoader
from tqdm import tqdm

train_set, test_set = make_data()
whole = DataLoader(test_set, 8)
train, test = instep.shard(DataLoader(train_set, 8)), instep.shard(DataLoader(test_set, 8))


def mean_loss(model):
    total = 0.0
    for _, (x, y) in enumerate(tqdm(test)):
        total += loss_of(model(x), y).item() * len(x)
    return total / len(test.dataset)


def accuracy(model):
    correct = 0
    for x, y in instep.shard(whole):
        correct += (model(x).argmax(1) == y).sum().item()
    print(100.0 * correct / len(test_set))


def training(model):
    loss = 0.0
    for x, y in train:
        loss += loss_of(model(x), y).item() * len(x)
    loss /= train.total_len
    return loss


def on_whole_batches(model):
    correct = 0
    for x, y in whole:
        correct += (model(x).argmax(1) == y).sum().item()
    return correct / len(test_set)


def summed(model):
    correct = 0
    for x, y in test:
        correct += (model(x).argmax(1) == y).sum()
    return instep.all_reduce(correct) / len(test_set)


def of_own_rows(model):
    correct = seen = 0
    for x, y in test:
        correct += (model(x).argmax(1) == y).sum()
        seen += len(x)
    return correct / seen


def of_chosen_samples(model, rows):
    total = 0.0
    data = Digits(rows)
    for x, y in instep.shard(DataLoader(data, 8)):
        total += loss_of(model(x), y).item() * len(x)
    return total / len(rows)
