"""What a forked child sees of tensors that its parent goes on to change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import instep


@contextmanager
def kept_by_child(values: Callable[[], list[Tensor]], rank: int) -> Iterator[None]:
    """Fork a child on this rank, and assert after the block that it sees the values from before."""
    before = [value.clone() for value in values()]
    go_reads, go = os.pipe()
    done, done_writes = os.pipe()
    child = os.fork() if instep.rank == rank else None
    if child == 0:
        os.read(go_reads, 1)
        same = all(map(torch.equal, before, values()))
        os.write(done_writes, b"y" if same else b"n")
        os._exit(0)
    yield
    os.write(go, b"!")
    if child is not None:
        assert os.read(done, 1) == b"y"
        os.waitpid(child, 0)
    for end in (go, go_reads, done, done_writes):
        os.close(end)
