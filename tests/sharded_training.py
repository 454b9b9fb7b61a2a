"""Trainings of unedited scripts: decorators that list them, and the parts that they share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from instep.process.import_hooks import after_import
from instep.process.patching import PatchHandle
from instep.process.torch_private.compiler import allow_repeated_backward
from instep.unedited.patch_table import SHARDED_CALL_PATCHES
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run import sharded_output
from oracle import Log
from pool import device

Training = Callable[[Log], None]
SHARDED: list[Training] = []
WHOLE: list[Training] = []


def sharded(training: Training) -> Training:
    """The numbers of one process, and every module of it sharded."""
    SHARDED.append(training)
    return training


def whole(training: Training) -> Training:
    """The numbers of one process, and its module computed whole on every rank."""
    WHOLE.append(training)
    return training


LARGE = {
    "large_outputs_that_only_a_loss_looks_at": 0,
    "large_outputs_that_everybody_looks_at": 0,
    "outputs_just_large_enough": 13 * 3 * 8,  # of 13 rows, but not of 12
    "losses_of_large_outputs": 0,
    "losses_of_large_outputs_one_by_one": 0,
    "losses_of_large_outputs_that_broadcast": 0,
    "losses_of_two_large_outputs": 0,
}
"""Bytes from which on an output of these trainings counts as large."""


def unedited(log: Log, training: Training, is_sharded: bool | None) -> None:
    """Play `training` as `instep run` would: sharded where there are other ranks.

    `is_sharded`: whether every call is; None: some are.
    """
    ranks = torch.distributed.is_initialized()
    patched = PatchHandle(SHARDED_CALL_PATCHES if ranks else ())
    modules.reset()
    sharded_output.LARGE = LARGE.get(training.__name__, 2**20)
    try:
        training(log)
    finally:
        patched.remove()
    if ranks:
        work = modules.call_counts
        assert is_sharded is None or (work.whole == 0) == is_sharded, work
        assert work.sharded > 0 or is_sharded is False, work


def batches(steps: int = 4, *, rows: int = 12) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        x = torch.randn(rows + k % 2, 6, generator=generator, device="cpu").double()
        y = torch.randint(3, (rows + k % 2,), generator=generator, device="cpu")
        yield x.to(device()), y.to(device())


def train(
    log: Log,
    model: nn.Module,
    step: Callable[[Tensor, Tensor], Tensor],
    *others: nn.Module,
    rows: int = 12,
    steps: int = 4,
    lr: float = 0.1,
    fused: bool | None = None,
) -> None:
    """The loop that most scripts have."""
    everything = tuple(m.double().to(device()) for m in (model, *others))
    parameters = [p for m in everything for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)
    log.begin(*everything)
    for x, y in batches(steps, rows=rows):
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        log.loss(loss)
        log.step(optimizer, *everything)


def mlp(*middle: nn.Module, out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, out))


class Around(nn.Module):
    """An mlp, for a forward of its own."""

    def __init__(self, *middle: nn.Module, out: int = 3) -> None:
        super().__init__()
        self.body = mlp(*middle, out=out)


class With(Around):
    """An mlp whose outputs go through a function, with whatever else it is given."""

    def __init__(self, function: Callable[..., Any], *middle: nn.Module) -> None:
        super().__init__(*middle)
        self.function = function

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(self.body(x), *others)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


@contextlib.contextmanager
def sharding() -> Iterator[io.StringIO]:
    """Inside, module calls are sharded; gives what is printed about it."""
    log = io.StringIO()
    patched = PatchHandle(SHARDED_CALL_PATCHES)
    modules.reset()
    cancel = after_import("torch._dynamo", lambda _: allow_repeated_backward())
    try:
        with contextlib.redirect_stderr(log):
            yield log
    finally:
        cancel()
        patched.remove()
