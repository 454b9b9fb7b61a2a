"""Gradients averaged over the ranks, bucket by bucket, while backward still runs.

A bucket is submitted by name when its last gradient is computed, so ranks may compute gradients in
different orders. A rank fills the gradients that it has not computed with zeros at the end.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.basics import ProcessSet, global_process_set, session
from instep.compat.horovod.collectives.handles import Handle, JoinedHandle
from instep.compat.horovod.collectives.reductions import NamedReduction, sparse_allreduce_async
from instep.compat.horovod.compression import Compressor
from instep.compat.horovod.errors import CallOrderError
from instep.compat.horovod.ops import Average, ReduceOp
from instep.process.patching import PatchHandle
from instep.training import gradients
from instep.training.buckets.layout import BucketLayout, plan_tensors
from instep.training.buckets.reducer import reducer_of
from instep.training.losses.averages import (
    GradientAverage,
    externally_averaged,
    zero_if_placeholder,
)


@dataclass(frozen=True)
class AveragingOptions:
    """How gradients are combined."""

    compression: type[Compressor]
    op: ReduceOp
    predivide: float
    """The divisor of an average's gradients before the sum; the sum is multiplied by it / ranks."""
    groups: tuple[tuple[Tensor, ...], ...] | int | None
    """The gradients that are sent together, or the number of groups; None for buckets by size."""
    sparse_as_dense: bool
    process_set: ProcessSet

    def reduction(self, name: str) -> NamedReduction:
        """The reduction of gradients that are sent under this name."""
        scales = (1 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)
        return NamedReduction(name, self.op, scales, self.process_set)


@dataclass(eq=False)
class _Bucket:
    """Gradients that are sent together."""

    name: str
    indices: list[int]
    ready: set[int] = field(default_factory=set)
    contexts: tuple[Any, ...] = ()
    """The compressor's `ctx` of each gradient."""
    handle: Handle | None = None


class GradientAverager:
    """The gradients of one optimizer's parameters."""

    def __init__(self, names: dict[Tensor, str], passes: int, options: AveragingOptions) -> None:
        self.passes = passes
        """The number of backwards after which a gradient is complete."""
        # Backward reaches the last parameters first. A replica's gradients are averages already.
        self._parameters = [
            p
            for p in reversed(names)
            if p not in reducer_of and (p.is_floating_point() or p.is_complex())
        ]
        self._names = names
        self._options = options
        self._done = [0] * len(self._parameters)
        self._trained = {i for i, p in enumerate(self._parameters) if p.requires_grad}
        self._sparse: set[int] = set()
        self._sparse_handles: dict[int, JoinedHandle] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._planned: set[int] = set()
        self._session = session()
        self._average = GradientAverage(
            is_of_all_ranks=options.process_set is global_process_set, is_mean=options.op == Average
        )
        for index, parameter in enumerate(self._parameters):
            self._hook(index, parameter)
        PatchHandle([gradients.PATCH])

    @property
    def has_pending(self) -> bool:
        """Whether gradients have been computed since the last `wait`."""
        return any(self._done)

    def wait(self) -> None:
        """Submit the remaining buckets, wait for all, and write the averages into `.grad`."""
        try:
            self.adapt()
            if not self.has_pending:  # else the buckets of this step may have been sent
                self._plan()
            for index in self._planned:
                if index not in self._bucket_of[index].ready:
                    self._mark_ready(index)
            for index in sorted(self._sparse - self._sparse_handles.keys()):
                self._mark_sparse_ready(index)
            for bucket in self._buckets:
                self._write_grads(bucket)
            for index, handle in self._sparse_handles.items():
                grad = self._parameters[index].grad
                assert grad is not None
                grad.zero_().add_(handle.result())
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop the gradients that are being averaged."""
        self._sparse_handles.clear()
        self._done = [0] * len(self._parameters)
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.handle = None

    def adapt(self) -> None:
        """In an elastic job, forget what this rank has learnt of its gradients in an earlier world:
        new ranks have not, and buckets are matched by their names."""
        if self._session is not session():
            self._session = session()
            self.reset()
            self._trained = {i for i, p in enumerate(self._parameters) if p.requires_grad}
            self._sparse.clear()
            self._planned = set()
            self._buckets, self._bucket_of = [], {}

    # ------------------------------------------------------------------------ during backward

    def _hook(self, index: int, parameter: Tensor) -> None:
        externally_averaged[parameter] = self._average
        frozen = not parameter.requires_grad
        parameter.requires_grad_()  # hooks need it; a frozen parameter may thaw later
        parameter.register_hook(zero_if_placeholder)
        # The garbage collector does not see what a tensor's hooks hold: with a reference to this
        # object, which holds the parameters, none of them would ever be freed.
        reference = weakref.ref(self)

        def notice_grad(_: Tensor) -> None:
            averager = reference()
            if averager is not None:  # else its optimizer is gone
                averager._on_grad(index)

        parameter.register_post_accumulate_grad_hook(notice_grad)
        parameter.requires_grad_(not frozen)

    def _on_grad(self, index: int) -> None:
        """A backward has added to this parameter's gradient (autograd calls this)."""
        parameter = self._parameters[index]
        if externally_averaged[parameter] is not self._average:
            return  # a later optimizer averages it
        if self._done[index] >= self.passes:
            name = self._names[parameter]
            raise CallOrderError(
                f"the gradient of {name} was computed more than "
                f"backward_passes_per_step={self.passes} times since the last step(). Call step() "
                "or synchronize() before the next backward, or raise backward_passes_per_step to "
                "accumulate."
            )
        if not self.has_pending:
            self._plan()
        self._done[index] += 1
        if self._done[index] == self.passes:
            self._trained.add(index)
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse and not self._options.sparse_as_dense:
            self._start_sparse(index, parameter.grad)
            if index not in self._bucket_of:
                return
        if index not in self._bucket_of:  # has thawed
            self._add_bucket([index])
        bucket = self._bucket_of[index]
        bucket.ready.add(index)
        if len(bucket.ready) == len(bucket.indices):
            self._start(bucket)

    def _mark_sparse_ready(self, index: int) -> None:
        """One that no bucket has: the step comes before its last backward, or has none of it."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            no_rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = parameter.detach()[:0]
            parameter.grad = torch.sparse_coo_tensor(
                no_rows, values, parameter.shape, check_invariants=False
            )
        self._mark_ready(index)

    def _start(self, bucket: _Bucket) -> None:
        dense = [self._dense(self._parameters[index]) for index in bucket.indices]
        small, bucket.contexts = zip(*map(self._options.compression.compress, dense), strict=True)
        bucket.handle = self._options.reduction(bucket.name).start(small, in_place=True)

    def _dense(self, parameter: Tensor) -> Tensor:
        """The dense gradient to send; zeros for a sparse one, which is sent on its own, until the
        next plan."""
        grad = parameter.grad
        assert grad is not None
        if not grad.is_sparse:
            return grad
        return grad.to_dense() if self._options.sparse_as_dense else torch.zeros_like(parameter)

    def _start_sparse(self, index: int, grad: Tensor) -> None:
        self._sparse.add(index)
        name = f"gradient of {self._names[self._parameters[index]]}"
        self._sparse_handles[index] = sparse_allreduce_async(
            grad, name, self._options.op, self._options.process_set
        )

    def _write_grads(self, bucket: _Bucket) -> None:
        assert bucket.handle is not None
        totals = bucket.handle.result()
        for index, total, context in zip(bucket.indices, totals, bucket.contexts, strict=True):
            parameter = self._parameters[index]
            average = self._options.compression.decompress(total, context)
            if parameter.grad is None:
                parameter.grad = average.clone()
            elif parameter.grad.is_sparse:
                parameter.grad = average.to_sparse(parameter.grad.sparse_dim())
            elif parameter.grad is not average:
                parameter.grad.copy_(average)

    # ------------------------------------------------------------------------------- the plan

    def _plan(self) -> None:
        """Make buckets for the parameters that are trained now, unless they have not changed."""
        self.adapt()
        wanted = self._trained - self._sparse
        if wanted == self._planned:
            return
        self._buckets, self._bucket_of = [], {}
        for group in self._split_into_groups(sorted(wanted)):
            for plan in self._split_by_size(group):
                self._add_bucket([slot.index for slot in plan.slots])
        self._planned = wanted

    def _add_bucket(self, indices: list[int]) -> None:
        first, last = (self._names[self._parameters[indices[k]]] for k in (0, -1))
        several = len(indices) > 1
        name = f"gradients of {first} ... {last}" if several else f"gradient of {first}"
        bucket = _Bucket(name, indices)
        self._buckets.append(bucket)
        self._bucket_of.update(dict.fromkeys(indices, bucket))

    def _split_by_size(self, indices: list[int]) -> list[BucketLayout]:
        """Buckets of one dtype each, limited in size unless the user has chosen the groups."""
        parameters = {index: self._parameters[index] for index in indices}
        by_size = self._options.groups is None
        total = sum(parameter.numel() for parameter in parameters.values())
        return plan_tensors(parameters, capacity=None if by_size else total)

    def _split_into_groups(self, indices: list[int]) -> list[list[int]]:
        groups = self._options.groups
        if groups is None:
            return [indices]
        if isinstance(groups, int):
            n, k = len(indices), min(groups, len(indices)) or 1
            return [indices[i * n // k : (i + 1) * n // k] for i in range(k)]
        index_of = {self._parameters[index]: index for index in indices}
        named = [[index_of[p] for p in group if p in index_of] for group in groups]
        grouped = {index for group in named for index in group}
        return [*filter(None, named), *([index] for index in indices if index not in grouped)]
