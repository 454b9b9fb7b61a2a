"""Sums gradients over the ranks, bucket by bucket, while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.objects import all_gather_object
from instep.distributed.communication.transport import Transport, overlap_group
from instep.errors import TrainingError
from instep.process import settings
from instep.training.buckets.checksum import LENGTH, check, mark
from instep.training.buckets.compression import Compression, wire
from instep.training.buckets.grad_buckets import Cargo, load, real
from instep.training.buckets.layout import plan_buckets
from instep.training.errors import MixedSumsError

reducer_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Who sums the gradient of a parameter."""


class Backward:
    """What one backward on this rank has to know."""

    def __init__(self, *, is_placeholder: bool, communicating: bool) -> None:
        self.is_placeholder = is_placeholder
        """Whether this rank has no rows: its gradients are zeros, whatever was computed."""
        self.communicating = communicating
        """Whether the sums over ranks are made now."""
        self.reached: dict[Reducer, None] = {}
        """Whose parameters it came by."""


PLANS = 2
"""For so many sets of trained parameters a reducer keeps buckets, those used last: as many as a
script has that trains two of them by turns. Each set has flat tensors as large as its gradients."""

_under_way: Backward | None = None
_numbers = count()
"""Of the reducers, in the order in which all ranks make them."""


def under_way() -> bool:
    """Whether a backward collects gradients now."""
    return _under_way is not None


@contextmanager
def collecting(backward: Backward) -> Iterator[None]:
    """While autograd runs inside, gradients are collected; at the end `.grad` holds the sums."""
    global _under_way
    _under_way = backward
    try:
        yield
        for reducer in backward.reached:
            reducer.finish()
    finally:
        for reducer in backward.reached:
            reducer.reset()
        _under_way = None


def all_reduce_sparse(grad: Tensor) -> Tensor:
    """The sum over ranks of a sparse gradient. Collective."""
    mine = grad.coalesce()
    # Pickled on a GPU, they would arrive on the GPU of that number, which is another rank's.
    parts = all_gather_object((mine.indices().cpu(), mine.values().cpu()))
    indices, values = zip(*parts, strict=True)
    return torch.sparse_coo_tensor(
        torch.cat(indices, dim=1).to(grad.device),
        torch.cat(values).to(grad.device),
        grad.shape,
        check_invariants=False,
    ).coalesce()


def _load(
    parameters: Sequence[tuple[int, nn.Parameter]],
    way: Transport,
    compression: Compression,
    number: int,
) -> list[Cargo]:
    """Buckets for parameters given with their indices."""
    widest = max((p.element_size() for _, p in parameters), default=1)
    plans = plan_buckets(
        [(index, p.numel()) for index, p in parameters],
        [(p.dtype, p.device) for _, p in parameters],
        capacity=int(settings.BUCKET_MIB) * 2**20 // widest,
    )
    of = dict(parameters)
    return [load(plan, of, way, wire(plan, of, compression), number) for plan in plans]


class _Plan:
    """The buckets for what is trained now, and where in them each parameter is."""

    def __init__(self, cargoes: Sequence[Cargo]) -> None:
        self.cargoes = cargoes
        self.where = {index: cargo for cargo in cargoes for index in cargo.parameters}


class Reducer:
    """Sums the gradients of some parameters over the ranks, bucket by bucket, during backward."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        way: Transport,
        compression: Compression = None,
    ) -> None:
        self.transport = way
        self._aside = overlap_group(way)
        """Where the buckets travel: batch normalisation talks in between, and where in between a
        bucket is full depends on what this rank has used."""
        self._compression = compression
        self._number = next(_numbers)
        # Backward reaches the last parameters first.
        self._parameters = list(reversed(parameters))
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._where: Mapping[int, Cargo] = {}
        self._cargoes: Sequence[Cargo] = ()
        self._launched = 0
        self._partial: set[int] = set()
        self._sparse: set[int] = set()
        self._summed: set[int] = set()
        self._marks: dict[int, Tensor] = {}
        """Of what was summed on the spot: the sum of the ranks' marks."""
        self._hooks: list[_Hook] = []
        for index, parameter in enumerate(self._parameters):
            reducer_of[parameter] = self
            self._hooks.append(_Hook(self, index, parameter))

    def begin(self) -> None:
        """A backward has reached the first parameter: plan for what is trained now."""
        # In every step, for every parameter: what is looped over here, Python need not see.
        kinds = (
            tuple(map(_KIND, self._parameters)),
            tuple(map(len, map(_HOOKS, self._parameters))),
            tuple(map(bool, map(_LATER_HOOKS, self._parameters))),
            frozenset(self._sparse),
        )
        plan = self._plans.pop(kinds, None)
        if plan is None:
            live = [
                (i, p)
                for i, p in enumerate(self._parameters)
                if p.requires_grad and not (i in self._sparse or _observed(p))
            ]
            while len(self._plans) >= PLANS:  # before there are new ones
                del self._plans[next(iter(self._plans))]
            plan = _Plan(_load(live, self._aside, self._compression, self._number))
        self._plans[kinds] = plan
        self._cargoes, self._where = plan.cargoes, plan.where

    def collect(self, index: int, grad: Tensor) -> Tensor | None:
        """A parameter's gradient of this backward has been computed (autograd calls this)."""
        assert _under_way is not None
        if self not in _under_way.reached:
            _under_way.reached[self] = None
            self.begin()
        if _under_way.is_placeholder:
            grad = torch.zeros_like(grad)
        if not _under_way.communicating:
            self._keep(index)
            return grad
        cargo = self._where.get(index)
        if cargo is None or grad.is_sparse:
            return self._sum_now(index, grad)
        if index in cargo.filled:
            raise TrainingError(
                f"a parameter of shape {tuple(grad.shape)} got two gradients in one backward "
                "(reentrant checkpointing of a shared parameter); use use_reentrant=False."
            )
        cargo.take(index, grad, partial=index in self._partial)
        self._launch_full()
        return grad

    def _sum_now(self, index: int, grad: Tensor) -> Tensor:
        """The sum over ranks on the spot: for hooks of the user's, which must see it, and for
        sparse gradients, which do not travel in buckets."""
        parameter = self._parameters[index]
        if index in self._partial and parameter.grad is not None:
            grad = grad + parameter.grad
            parameter.grad = None
        self._partial.discard(index)
        self._summed.add(index)
        if grad.is_sparse:
            self._sparse.add(index)  # from the next backward on it has no place in a bucket
            return all_reduce_sparse(grad)
        marked = torch.cat([grad.reshape(-1), mark(grad, self._number, index)])
        self.transport.all_reduce(real(marked), "sum").wait()
        self._marks[index] = marked[-LENGTH:]
        return marked[:-LENGTH].view(grad.shape)

    def _check_marks(self) -> None:
        """Raise MixedSumsError where ranks have summed different parameters on the spot."""
        for index, total in self._marks.items():
            check(total, MixedSumsError.of_hooked(tuple(self._parameters[index].shape)))

    def _keep(self, index: int) -> None:
        """Without communication: `.grad` becomes this rank's part of the sum.

        What was there is the same on all ranks, so an N-th of it is this rank's part.
        """
        if index not in self._partial:
            self._partial.add(index)
            grad = self._parameters[index].grad
            if grad is not None:
                grad.div_(self.transport.size)

    def holds_part_of(self, parameter: Tensor) -> bool:
        """Whether `.grad` is this rank's part of a sum that is still to come."""
        return any(self._parameters[index] is parameter for index in self._partial)

    def _launch_full(self) -> None:
        """Start the buckets that are full, in their order: the same on all ranks."""
        if self._aside is self.transport:  # nothing travels while the caller goes on
            return
        while self._launched < len(self._cargoes) and self._cargoes[self._launched].full:
            self._cargoes[self._launched].launch(self._aside)
            self._launched += 1

    def finish(self) -> None:
        """Backward has ended: send the rest, wait, and put the sums into `.grad`."""
        if _under_way is None or not _under_way.communicating:
            return
        self._add_kept()
        self._check_marks()
        for cargo in self._cargoes[self._launched :]:
            cargo.launch(self._aside)
        self._launched = len(self._cargoes)
        for cargo in self._cargoes:
            cargo.follow(self._aside)
        for cargo in self._cargoes:
            cargo.deliver(self._summed)
        self._partial.clear()

    def _add_kept(self) -> None:
        """Parameters that only earlier backwards, without communication, have reached."""
        for index in sorted(self._partial):
            parameter = self._parameters[index]
            grad = parameter.grad
            if grad is None:
                continue
            if index not in self._where:
                parameter.grad = None
                parameter.grad = self._sum_now(index, grad)
            elif index not in self._where[index].filled:
                self._where[index].take_kept(index)

    def reset(self) -> None:
        """Forget this backward."""
        self._launched = 0
        self._summed.clear()
        self._marks.clear()
        for cargo in self._cargoes:
            cargo.reset()


class _Hook:
    """What autograd calls with a parameter's gradient; silent outside of a backward of ours."""

    def __init__(self, reducer: Reducer, index: int, parameter: nn.Parameter) -> None:
        self._reducer, self._index = reducer, index
        frozen = not parameter.requires_grad
        parameter.requires_grad_()  # a hook needs it; a frozen parameter may thaw later
        handle = parameter.register_hook(self)
        parameter.requires_grad_(not frozen)
        # Before the user's: these shall see the sum.
        _HOOKS(parameter).move_to_end(handle.id, last=False)

    def __call__(self, grad: Tensor) -> Tensor | None:
        if _under_way is None:  # torch.autograd.grad: the value goes to the user
            return None
        return self._reducer.collect(self._index, grad)


def _observed(parameter: nn.Parameter) -> bool:
    """Whether the user has hooks on this gradient, beside ours."""
    return len(_HOOKS(parameter)) > 1 or bool(_LATER_HOOKS(parameter))


_KIND = attrgetter("requires_grad", "dtype", "device")
_HOOKS = attrgetter("_backward_hooks")
_LATER_HOOKS = attrgetter("_post_accumulate_grad_hooks")
