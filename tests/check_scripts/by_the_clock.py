"""Training loops that the clock, or a slice by rank, ends at another step on each rank."""

import time
from datetime import datetime
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def with_a_limit(net, loader, limit):
    model, start = DistributedDataParallel(net), time.time()
    for x in loader:
        model(x).sum().backward()
        elapsed = time.time() - start
        if elapsed > limit:
            break


def in_a_test(net, loader, limit):
    model, start = DistributedDataParallel(net), time.monotonic()
    while time.monotonic() - start < limit:
        model(next(loader)).sum().backward()


def until_a_date(net, loader, end):
    model = DistributedDataParallel(net)
    for x in loader:
        model(x).sum().backward()
        if datetime.now() >= end:
            return


def decided_by_rank_0(net, loader, limit):
    model, start = DistributedDataParallel(net), time.time()
    for x in loader:
        model(x).sum().backward()
        late = torch.tensor(time.time() - start > limit)
        dist.broadcast(late, 0)
        if late:
            break


def without_an_end(net, loader):
    model, last = DistributedDataParallel(net), time.time()
    for step, x in enumerate(loader):
        model(x).sum().backward()
        if time.time() - last > 60:
            checked = step
            last = time.time()
        if step > checked + 1000:
            break
        if last is None or step < last:
            break


def wait_for_a_file(path, limit):
    start = time.time()
    while time.time() - start < limit:
        time.sleep(1)


def slices(net, loader, rank, world_size):
    model = DistributedDataParallel(net)
    for x in islice(loader, rank, None, world_size):
        model(x).sum().backward()
    for x in islice(loader, rank, 100 * world_size, world_size):
        model(x).sum().backward()
    for x in islice(loader, 100):
        model(x).sum().backward()
    return [model(x) for x in islice(loader, rank, None, world_size)]
