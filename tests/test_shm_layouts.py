"""The shared-memory backend gives what Gloo gives, however a tensor lies in memory.

Gloo answers for a contiguous copy: in silence it leaves the gaps of a strided one as they were.
"""

import functools
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pool import ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs Linux on x86-64"
    ),
]

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
]
LAYOUTS = {
    "contiguous": lambda memory: memory[:12].view(3, 4),
    "strided": lambda memory: memory[::2],
    "a column": lambda memory: memory.view(6, 4)[:, 1],
    "a block": lambda memory: memory.view(6, 4)[1:5, 1:3],
    "transposed": lambda memory: memory[:12].view(3, 4).t(),
    "expanded rows": lambda memory: memory[:4].expand(2, 4),
    "expanded columns": lambda memory: memory[:4, None].expand(4, 3),
    "an expanded number": lambda memory: memory[2].expand(4),
    "empty": lambda memory: memory[:0].view(0, 3),
    "empty and strided": lambda memory: memory[::2][:0],
    "zero-dimensional": lambda memory: memory[3],
    "one element of stride 2": lambda memory: memory[:2:2],
}
# Older versions of torch have the other names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(mine, others, **how):
    return [mine], dist.all_reduce(mine, **how)


def maximum(mine, others, **how):
    return [mine], dist.all_reduce(mine, ReduceOp.MAX, **how)


def reduce(mine, others, **how):
    work = dist.reduce(mine, 1, **how)
    return [mine] if dist.get_rank() == 1 else [], work  # Gloo leaves part sums on rank 0


def broadcast(mine, others, **how):
    return [mine], dist.broadcast(mine, 1, **how)


def all_gather(mine, others, **how):
    return others, dist.all_gather(others, mine, **how)


def gather_one(mine, others, **how):
    whole = mine.new_zeros(2 * mine.numel())
    mine = mine if how["group"] else mine.reshape(-1)  # Gloo wants equal shapes behind the first
    return [whole], all_gather_single(whole, mine, **how)


def reduce_scatter(mine, others, **how):
    return [mine], dist.reduce_scatter(mine, others, **how)


def reduce_scatter_one(mine, others, **how):
    part = mine.new_zeros(mine.numel() // 2)
    mine = mine if how["group"] else mine.reshape(-1)
    return [part], reduce_scatter_single(part, mine, **how)


@functools.cache
def shared():
    made = dist.new_group(backend="instep")
    assert made.shares_memory()
    return made


def memory(number, dtype):
    """Small numbers, others on each rank and in each tensor."""
    return ((torch.arange(24) * 7 + 5 * dist.get_rank() + number) % 4).to(dtype)


def outcome(operation, tensors, group, is_async):
    """What it wrote, or how it was refused."""
    mine, *others = tensors
    try:
        results, work = operation(mine, others, group=group, async_op=is_async)
        if work is not None:
            work.wait()
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__
    return [result.clone() for result in results]


def alike(ours, theirs):
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours == theirs
    if ours and ours[0].dtype == torch.bool:  # Gloo leaves 2 in a bool that is true twice
        theirs = [result.view(torch.uint8) != 0 for result in theirs]
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def gaps(memory, view):
    """What no element of the view stands for."""
    rest = memory.clone()
    rest[view(torch.arange(24)).reshape(-1)] = 0
    return rest


@pytest.mark.parametrize(
    "operation",
    [
        *(all_reduce, maximum, reduce, broadcast),
        *(all_gather, gather_one, reduce_scatter, reduce_scatter_one),
    ],
)
@ranks(2)
def test_every_layout_gives_what_gloo_gives(operation):
    shared()
    for name, view in LAYOUTS.items():
        for dtype in DTYPES:
            for is_async in (False, True):
                memories = [memory(number, dtype) for number in range(3)]
                before = [gaps(each, view) for each in memories]
                tensors = [view(each) for each in memories]
                if operation is reduce_scatter_one and tensors[0].numel() % 2:
                    continue
                copies = [tensor.clone().contiguous() for tensor in tensors]
                theirs = outcome(operation, copies, None, is_async)
                ours = outcome(operation, tensors, shared(), is_async)
                assert alike(ours, theirs), (name, dtype, is_async, ours, theirs)
                assert all(map(torch.equal, [gaps(each, view) for each in memories], before))
