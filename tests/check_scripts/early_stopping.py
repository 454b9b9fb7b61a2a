"""Trainings that end early, by the loss of a rank's own rows; and some that all ranks end."""

import instep
from torch.utils.data import DataLoader

train_loader = instep.shard(DataLoader(train_set, 64))
test_loader = instep.shard(DataLoader(test_set, 64))


def by_epochs_without_gain(model, optimizer):
    best, waited, steps = 9.0, 0, 0
    for epoch in range(9):
        for x, y in train_loader:
            loss_of(model(x), y).backward()
            steps += 1
        loss = 0.0
        for x, y in test_loader:
            loss += loss_of(model(x), y).item()
        if loss < best:
            best, waited = loss, 0
        else:
            waited += 1
        if waited > 2:
            break
        if steps > 100:
            break


def by_functions(model):
    waited, best = 0, 9.0
    for epoch in range(9):
        train(model)
        loss = own_loss(model)
        if loss > best:
            waited += 1
            if waited == 3:
                break
        best = min(best, loss)
        if own_loss(model) < 0.1:
            break
        if mean_loss(model) < 0.1:
            break


def by_an_object(model):
    stopper, together = EarlyStopping(patience=3), EarlyStopping(patience=3)
    for epoch in range(9):
        train(model)
        stopper(own_loss(model), model)
        together(mean_loss(model), model)
        if stopper.early_stop:
            break
        if together.early_stop:
            break


def train(model):
    for x, y in train_loader:
        loss_of(model(x), y).backward()


def own_loss(model):
    total, count = 0.0, 0
    for x, y in test_loader:
        total += loss_of(model(x), y).item() * len(x)
        count += len(x)
    return total / count


def mean_loss(model):
    mean = instep.Mean()
    for x, y in test_loader:
        mean.update(loss_of(model(x), y), len(x))
    return mean.compute()
