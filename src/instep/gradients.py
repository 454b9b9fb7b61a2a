"""The global batch's gradient, while backward still runs.

A loss that is a mean over this rank's rows has the weight count_r / count in the mean over the
batch, so the sum over ranks of weighted gradients is the gradient of the global batch. The weight
enters once, at the root of backward: whatever the loss is computed from, penalties included, is
scaled by it, and nothing below needs to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep import knobs
from instep.blocks import Block, current_block, marks_below
from instep.buckets import Bucket, Slot, plan_buckets
from instep.collectives import Pending, Transport
from instep.errors import MixedBatchesError, TrainingError
from instep.seams import Function

_reducer_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_backward: _Backward | None = None
_communicating = True


class _Backward:
    """What one backward on this rank has to know: whose rows it is of, which models it reached."""

    def __init__(self, ghost: bool) -> None:
        self.ghost = ghost
        self.reached: dict[Reducer, None] = {}


@contextmanager
def no_sync() -> Iterator[None]:
    """Let backward add up this rank's gradients only; the next one outside sends them all.

    Between the two `.grad` is this rank's part of the sum. Saves messages in accumulation;
    the gradient in the end is the same.
    """
    global _communicating
    before, _communicating = _communicating, False
    try:
        yield
    finally:
        _communicating = before


# ------------------------------------------------------------------------ the root of backward


def backward(
    original: Function,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward for graphs that contain a replica; else the original.

    Raises MixedBatchesError, and TrainingError for create_graph=True.
    """
    rest = (retain_graph, create_graph, grad_variables, inputs)
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    nested = torch._C._current_graph_task_id() != -1  # reentrant checkpointing
    if nested or not _reducer_of:
        original(tensors, grad_tensors, *rest)
        return
    blocks, touched = marks_below(roots, _reducer_of)
    if not touched:
        original(tensors, grad_tensors, *rest)
        return
    if create_graph:
        raise TrainingError(
            "backward(create_graph=True) of a replicated model: the sum over ranks has no graph. "
            "Use torch.autograd.grad(..., create_graph=True) for the inner gradient, then backward."
        )
    block = _one_block(blocks)
    _run(original, roots, _weighted(roots, grad_tensors, block), rest, block)


def _run(
    original: Function,
    roots: tuple[Tensor, ...],
    weighted: list[Tensor | None],
    rest: tuple[Any, ...],
    block: Block | None,
) -> None:
    global _backward
    _backward = _Backward(ghost=block is not None and block.empty)
    try:
        original(roots, weighted, *rest)
        for reducer in _backward.reached:
            reducer.finish()
    finally:
        for reducer in _backward.reached:
            reducer.reset()
        _backward = None


def _one_block(blocks: set[Block | None]) -> Block | None:
    """The block of a backward. All ranks decide alike: by the batches' sizes, not by this share."""
    if not blocks:
        return current_block()
    first, *others = blocks
    if any(_shares(block) != _shares(first) for block in others):
        raise MixedBatchesError(block.share for block in blocks if block is not None)
    return first


def _shares(block: Block | None) -> tuple[float, ...] | None:
    return None if block is None else block.shares()


def _weighted(roots: tuple[Tensor, ...], grads: Any, block: Block | None) -> list[Tensor | None]:
    """The gradients at the roots times this rank's weight; equal weights without a block."""
    given = [grads] * len(roots) if grads is None or isinstance(grads, Tensor) else list(grads)
    if block is None:
        reducer = next(iter(_reducer_of.values()))
        weight = 1.0 / reducer.transport.size
    else:
        weight = block.share
    result: list[Tensor | None] = []
    for root, grad in zip(roots, given, strict=True):
        if grad is None and root.numel() == 1:
            grad = torch.ones_like(root)
        result.append(None if grad is None else grad * weight)
    return result


# ---------------------------------------------------------------------------- the parameters


class _Cargo:
    """One bucket of one reducer: the flat tensor that travels.

    Behind the gradients lies one number per slot, "this rank has it": what no rank has keeps
    `.grad` as it was, as in one process.
    """

    def __init__(self, plan: Bucket, like: Tensor) -> None:
        self.plan = plan
        self.flat = torch.zeros(plan.numel + len(plan.slots), dtype=like.dtype, device=like.device)
        self.has = self.flat[plan.numel :]
        self.filled: set[int] = set()
        self.pending: Pending | None = None

    @property
    def full(self) -> bool:
        return len(self.filled) == len(self.plan.slots)

    def launch(self, way: Transport) -> None:
        self.has.fill_(1)
        for k, slot in enumerate(self.plan.slots):
            if slot.index not in self.filled:
                self.flat[slot.start : slot.stop].zero_()
                self.has[k] = 0
        flat = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        self.pending = way.all_reduce(flat, "sum")


def _load(parameters: Sequence[tuple[int, nn.Parameter]]) -> list[_Cargo]:
    """Buckets for parameters given with their indices."""
    widest = max(p.element_size() for _, p in parameters)
    plans = plan_buckets(
        [(index, p.numel()) for index, p in parameters],
        [(p.dtype, p.device) for _, p in parameters],
        capacity=int(knobs.BUCKET_MIB) * 2**20 // widest,
    )
    like = dict(parameters)
    return [_Cargo(plan, like[plan.slots[0].index]) for plan in plans]


class Reducer:
    """Sums the gradients of some parameters over the ranks, bucket by bucket, during backward."""

    def __init__(self, parameters: Sequence[nn.Parameter], way: Transport) -> None:
        self.transport = way
        # Backward reaches the last parameters first.
        self._parameters = list(reversed(parameters))
        self._plans: dict[tuple[object, ...], list[_Cargo]] = {}
        self._cargoes: list[_Cargo] = []
        self._where: dict[int, tuple[_Cargo, Slot]] = {}
        self._launched = 0
        self._before: dict[int, Tensor] = {}
        self._partial: set[int] = set()
        for index, parameter in enumerate(self._parameters):
            _reducer_of[parameter] = self
            frozen = not parameter.requires_grad
            parameter.requires_grad_()  # a hook needs it; a frozen one may thaw later
            parameter.register_hook(_Hook(self, index))
            parameter.requires_grad_(not frozen)

    def begin(self) -> None:
        """A backward has reached the first parameter: plan for what is trained now."""
        live = [(i, p) for i, p in enumerate(self._parameters) if p.requires_grad]
        kinds = tuple((i, p.dtype, p.device) for i, p in live)
        if kinds not in self._plans:
            self._plans[kinds] = _load(live)
        self._cargoes = self._plans[kinds]
        self._where = {
            slot.index: (cargo, slot) for cargo in self._cargoes for slot in cargo.plan.slots
        }

    def collect(self, index: int, grad: Tensor) -> Tensor | None:
        """A parameter's gradient of this backward has been computed (autograd calls this)."""
        assert _backward is not None
        if self not in _backward.reached:
            _backward.reached[self] = None
            self.begin()
        if _backward.ghost:
            grad = torch.zeros_like(grad)
        if not _communicating:
            self._keep(index)
            return grad
        parameter = self._parameters[index]
        cargo, slot = self._where[index]
        if index in cargo.filled:
            raise TrainingError(
                f"a parameter of shape {tuple(parameter.shape)} got two gradients in one backward "
                "(reentrant checkpointing of a shared parameter); use use_reentrant=False."
            )
        flat = cargo.flat[slot.start : slot.stop].view(parameter.shape)
        flat.copy_(grad)
        if parameter.grad is not None:
            if index in self._partial:
                flat.add_(parameter.grad)
            else:
                self._before[index] = parameter.grad
            parameter.grad = None
        cargo.filled.add(index)
        self._launch_full()
        return grad

    def _keep(self, index: int) -> None:
        """Without communication: `.grad` becomes this rank's part of the sum.

        What was there is the same on all ranks, so an N-th of it is this rank's part.
        """
        if index not in self._partial:
            self._partial.add(index)
            grad = self._parameters[index].grad
            if grad is not None:
                grad.div_(self.transport.size)

    def _launch_full(self) -> None:
        """Start the buckets that are full, in their order: the same on all ranks."""
        while self._launched < len(self._cargoes) and self._cargoes[self._launched].full:
            self._cargoes[self._launched].launch(self.transport)
            self._launched += 1

    def finish(self) -> None:
        """Backward has ended: send the rest, wait, and put the sums into `.grad`."""
        if not _communicating:
            return
        self._add_kept()
        for cargo in self._cargoes[self._launched :]:
            cargo.launch(self.transport)
        self._launched = len(self._cargoes)
        for cargo in self._cargoes:
            assert cargo.pending is not None
            cargo.pending.wait()
            for k, slot in enumerate(cargo.plan.slots):
                if slot.index in cargo.filled or cargo.has[k].real > 0:
                    self._deliver(slot.index, cargo.flat[slot.start : slot.stop])
        self._partial.clear()

    def _add_kept(self) -> None:
        """Parameters that only earlier backwards, without communication, have reached."""
        for index in sorted(self._partial):
            cargo, slot = self._where[index]
            grad = self._parameters[index].grad
            if index not in cargo.filled and grad is not None:
                cargo.flat[slot.start : slot.stop].view(grad.shape).copy_(grad)
                cargo.filled.add(index)

    def _deliver(self, index: int, total: Tensor) -> None:
        parameter = self._parameters[index]
        total = total.view(parameter.shape)
        before = self._before.get(index)
        if before is not None:
            parameter.grad = before.add_(total)
        elif parameter.grad is None:
            parameter.grad = total.clone()
        elif index not in self._where[index][0].filled:
            parameter.grad.add_(total)
        else:
            parameter.grad.copy_(total)

    def reset(self) -> None:
        """Forget this backward."""
        self._launched = 0
        self._before.clear()
        for cargo in self._cargoes:
            cargo.filled.clear()
            cargo.pending = None


class _Hook:
    """What autograd calls with a parameter's gradient; silent outside of a backward of ours."""

    def __init__(self, reducer: Reducer, index: int) -> None:
        self._reducer, self._index = reducer, index

    def __call__(self, grad: Tensor) -> Tensor | None:
        if _backward is None:  # torch.autograd.grad: the value goes to the user
            return None
        return self._reducer.collect(self._index, grad)
