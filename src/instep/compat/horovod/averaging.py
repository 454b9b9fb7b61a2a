"""Gradients on their way: reduced over the ranks bucket by bucket, while backward still runs.

A bucket is submitted by name when the last of its gradients is there, so ranks may reach their
parameters in different orders, and what one rank does not reach it fills with zeros at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from instep import calls, gradients, knobs
from instep.buckets import Bucket, Slot, plan_buckets
from instep.compat.horovod.allreduce import Reduction, SparseHandle, only, sparse_allreduce_async
from instep.compat.horovod.compression import ELEMENTWISE, Compressor
from instep.compat.horovod.errors import OutOfTurnError
from instep.compat.horovod.handles import Handle
from instep.compat.horovod.ops import Average, ReduceOp
from instep.compat.horovod.sets import ProcessSet
from instep.reducer import reducer_of
from instep.seams import step_in


@dataclass(frozen=True)
class Terms:
    """How gradients are combined."""

    compression: type[Compressor]
    op: ReduceOp
    predivide: float
    """An average is the sum of gradients over this, times this over the number of ranks."""
    groups: tuple[tuple[Tensor, ...], ...] | int | None
    """Which gradients travel together, or in how many groups; None for buckets by size."""
    sparse_as_dense: bool
    process_set: ProcessSet

    def reduction(self, name: str) -> Reduction:
        """Of gradients that travel under this name."""
        scales = (1 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)
        return Reduction(name, self.op, scales, self.process_set)


@dataclass(eq=False)
class _Cargo:
    """One bucket, its tensor, and where it is."""

    name: str
    plan: Bucket
    flat: Tensor
    filled: set[int] = field(default_factory=set)
    context: Any = None
    handle: Handle | None = None


class Averaging:
    """The gradients of one optimizer's parameters."""

    def __init__(self, names: dict[Tensor, str], passes: int, terms: Terms) -> None:
        self.passes = passes
        """After how many backwards a gradient is complete."""
        # Backward reaches the last parameters first. A replica's gradients are averages already.
        self._parameters = [
            p
            for p in reversed(names)
            if p not in reducer_of and (p.is_floating_point() or p.is_complex())
        ]
        self._names = names
        self._terms = terms
        self._done = [0] * len(self._parameters)
        self._trained = {i for i, p in enumerate(self._parameters) if p.requires_grad}
        self._sparse: set[int] = set()
        self._sparse_handles: dict[int, SparseHandle] = {}
        self._cargoes: list[_Cargo] = []
        self._where: dict[int, tuple[_Cargo, Slot]] = {}
        self._planned: set[int] = set()
        for index, parameter in enumerate(self._parameters):
            self._hook(index, parameter)
        step_in(torch.autograd, "backward", gradients.backward)

    @property
    def under_way(self) -> bool:
        """Whether gradients have been computed since the last `finish`."""
        return any(self._done)

    def finish(self) -> None:
        """Submit what backward has not reached, wait for all, and put the results into `.grad`."""
        self._plan()
        for index in self._planned:
            cargo, _ = self._where[index]
            if index not in cargo.filled:
                self._fill(index)
        for cargo in self._cargoes:
            self._deliver(cargo)
        for index, handle in self._sparse_handles.items():
            grad = self._parameters[index].grad
            assert grad is not None
            grad.zero_().add_(handle.result())
        self.forget()

    def forget(self) -> None:
        """No backward has been."""
        self._sparse_handles.clear()
        self._done = [0] * len(self._parameters)
        for cargo in self._cargoes:
            cargo.filled.clear()
            cargo.handle = None

    # ------------------------------------------------------------------------ during backward

    def _hook(self, index: int, parameter: Tensor) -> None:
        gradients.averaged_elsewhere[parameter] = True
        frozen = not parameter.requires_grad
        parameter.requires_grad_()  # hooks need it; a frozen parameter may thaw later
        parameter.register_hook(_silent_ghost)
        parameter.register_post_accumulate_grad_hook(lambda _: self._reached(index))
        parameter.requires_grad_(not frozen)

    def _reached(self, index: int) -> None:
        """A backward has added to this parameter's gradient (autograd calls this)."""
        if self._done[index] >= self.passes:
            name = self._names[self._parameters[index]]
            raise OutOfTurnError.too_many_passes(name, self.passes)
        if not self.under_way:
            self._plan()
        self._done[index] += 1
        if self._done[index] == self.passes:
            self._trained.add(index)
            self._fill(index)

    def _fill(self, index: int) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.is_sparse and not self._terms.sparse_as_dense:
            self._start_sparse(index, grad)
            if index not in self._where:
                return
            grad = torch.zeros_like(parameter)  # until the next plan, which leaves it out
        if index not in self._where:  # has thawed
            self._add(self._bucket([index]))
        cargo, slot = self._where[index]
        dense = grad.to_dense() if grad.is_sparse else grad
        cargo.flat[slot.start : slot.stop].view(parameter.shape).copy_(dense)
        cargo.filled.add(index)
        if len(cargo.filled) == len(cargo.plan.slots):
            small, cargo.context = self._terms.compression.compress(cargo.flat)
            cargo.handle = self._terms.reduction(cargo.name).start([small], [small], only)

    def _start_sparse(self, index: int, grad: Tensor) -> None:
        self._sparse.add(index)
        name = f"gradient of {self._names[self._parameters[index]]}"
        self._sparse_handles[index] = sparse_allreduce_async(
            grad, name, self._terms.op, self._terms.process_set
        )

    def _deliver(self, cargo: _Cargo) -> None:
        assert cargo.handle is not None
        total = self._terms.compression.decompress(cargo.handle.result(), cargo.context)
        for slot in cargo.plan.slots:
            if slot.index in self._sparse_handles:
                continue
            parameter = self._parameters[slot.index]
            part = total.view(-1)[slot.start : slot.stop].view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = part.clone()
            elif parameter.grad.is_sparse:
                parameter.grad = part.to_sparse(parameter.grad.sparse_dim())
            else:
                parameter.grad.copy_(part)

    # ------------------------------------------------------------------------------- the plan

    def _plan(self) -> None:
        """Buckets for what is trained now, unless they are there."""
        wanted = self._trained - self._sparse
        if wanted == self._planned:
            return
        self._cargoes, self._where = [], {}
        for bucket in self._buckets(sorted(wanted)):
            self._add(bucket)
        self._planned = wanted

    def _add(self, bucket: Bucket) -> None:
        first, last = (self._parameters[slot.index] for slot in (bucket.slots[0], bucket.slots[-1]))
        name = f"gradient of {self._names[first]}"
        if first is not last:
            name = f"gradients of {self._names[first]} ... {self._names[last]}"
        flat = torch.empty(bucket.numel, dtype=first.dtype, device=first.device)
        if self._terms.compression not in ELEMENTWISE:
            flat = flat.view(first.shape)
        cargo = _Cargo(name, bucket, flat)
        self._cargoes.append(cargo)
        self._where.update((slot.index, (cargo, slot)) for slot in bucket.slots)

    def _buckets(self, indices: list[int]) -> list[Bucket]:
        if self._terms.compression not in ELEMENTWISE:
            return [self._bucket([index]) for index in indices]
        return [
            bucket
            for group in self._grouped(indices)
            for bucket in self._sized(group, limited=self._terms.groups is None)
        ]

    def _bucket(self, indices: list[int]) -> Bucket:
        (bucket,) = self._sized(indices, limited=False)
        return bucket

    def _sized(self, indices: list[int], limited: bool) -> list[Bucket]:
        parameters = [self._parameters[index] for index in indices]
        widest = max((p.element_size() for p in parameters), default=1)
        everything = sum(p.numel() for p in parameters)
        return plan_buckets(
            [(index, p.numel()) for index, p in zip(indices, parameters, strict=True)],
            [(p.dtype, p.device) for p in parameters],
            capacity=int(knobs.BUCKET_MIB) * 2**20 // widest if limited else everything,
        )

    def _grouped(self, indices: list[int]) -> list[list[int]]:
        groups = self._terms.groups
        if groups is None:
            return [indices]
        if isinstance(groups, int):
            n, k = len(indices), min(groups, len(indices)) or 1
            return [indices[i * n // k : (i + 1) * n // k] for i in range(k)]
        index_of = {self._parameters[index]: index for index in indices}
        named = [[index_of[p] for p in group if p in index_of] for group in groups]
        grouped = {index for group in named for index in group}
        return [*filter(None, named), *([index] for index in indices if index not in grouped)]


def _silent_ghost(grad: Tensor) -> Tensor | None:
    """A rank without rows contributes zeros, whatever it computed."""
    call = calls.current()
    return torch.zeros_like(grad) if call is not None and call.ghost else None
