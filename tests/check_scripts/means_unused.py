"""Means over the ranks that are computed, and then not used: this rank's own values are."""

import torch
import torch.distributed as dist


def mean_of_ranks(tensor):
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total / dist.get_world_size()


def mean_in_place(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
    return tensor


def evaluate(model, loader, losses, hits):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accuracy = (model(x).argmax(1) == y).float().mean()
        reduced_loss = mean_of_ranks(loss)
        reduced_accuracy = mean_of_ranks(accuracy)
        _ = mean_of_ranks(loss)
        all_are_here = mean_of_ranks(torch.ones(1))
        unused = mean_in_place(loss)
        losses.update(loss.item(), len(x))
        hits.update(reduced_accuracy.item(), len(x))
