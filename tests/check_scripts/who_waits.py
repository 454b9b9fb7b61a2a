"""What may and what may not stand where only one rank comes."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
is_main = rank == 0
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))


def total(value):
    dist.all_reduce(value)
    return value


def of_all_or_of_one(value, together=False):
    if together:
        dist.all_reduce(value)
    return value


def early(value):
    if rank != 0:
        return None
    dist.broadcast(value, 0)
    return value


def first_rank_first(path):
    if not is_main:
        dist.barrier()
    data = torch.load(path)
    if is_main:
        dist.barrier()
    return data


def either_side(value):
    if rank == 0:
        dist.broadcast(value, 0)
    else:
        dist.broadcast(torch.empty(2), 0)


for batch in torch.randn(3, 8, 4):
    loss = model(batch).sum()
    loss.backward()
    if is_main:
        print(total(loss))
        print(of_all_or_of_one(loss))
        print(model(batch))
        print(model.module(batch))
    if is_main and loss > 3:
        dist.monitored_barrier()
    if rank >= 0 and dist.is_initialized():
        dist.barrier()

writer = open("log.txt", "w") if rank == 0 else None
if writer is not None:
    dist.barrier()
    writer.write("done")
dist.destroy_process_group()
