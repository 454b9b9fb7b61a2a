"""What is kept of this rank's rows, and what only some ranks do; and both as they should be."""

import time

import instep
import numpy as np
import torch
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader

loader = instep.shard(make_loader())


def kept_in_a_list(model):
    losses, labels, outputs, seconds = [], [], [], []
    losses_of_all = Meter()
    for x, y in loader:
        start = time.time()
        loss = loss_of(model(x), y)
        losses.append(loss.item())
        labels.extend(y.tolist())
        outputs.append(model(x))
        losses_of_all.update(loss.item(), len(x))
        seconds.append(time.time() - start)
    print(np.mean(losses), np.mean(seconds), sum(losses) / len(losses))
    print(f1_score(labels, labels))
    print("not of the rows", sum(seconds))
    print(torch.cat(outputs).argmax(1))
    print(losses_of_all.avg)


def on_one_rank(model):
    mean = instep.Mean()
    if instep.rank == 0:
        correct = 0
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum()
            mean.update(correct, 1)
        print(mean.compute())


def left_by_the_others(checkpoint_folder, model):
    checkpoint = instep.Checkpoint(checkpoint_folder, model=model)
    if instep.rank != 0:
        return
    checkpoint.save()


@instep.single_process_scope()
def in_a_world_of_one(model):
    accuracy = instep.Accuracy()
    for x, y in loader:
        accuracy.update(model(x), y)
    return accuracy.compute(), instep.all_reduce(torch.ones(1))


def kept_if_best(model):
    best = 0.0
    for epoch in range(9):
        total = batches = 0.0
        for x, y in loader:
            total += loss_of(model(x), y).item()
            batches += 1
        if total < best:
            best = total
        if batches > 100:
            print("many")


def of_all_rows(model):
    outputs, accuracy = [], instep.Accuracy()
    for x, y in loader:
        accuracy.update(model(x), y)
        outputs.append(instep.gather_rows(model(x)))
    print(torch.cat(outputs), accuracy.compute())


def of_a_fraction(batch_size, data, loss):
    size = batch_size // instep.world_size
    instep.all_reduce(loss.detach(), "mean")
    instep.all_reduce(torch.ones(1))
    return instep.shard(DataLoader(data, batch_size=size)), DataLoader(data, batch_size=size)
