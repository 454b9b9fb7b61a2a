"""Sums gradients over the ranks, bucket by bucket, while backward still runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import sub
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.transport import Transport, overlap_group
from instep.distributed.flight_record.recorder import recorder
from instep.process.exit_status import group_ranks
from instep.process.process_value import ProcessValue
from instep.process.torch_private.autograd import hooks_of, later_hooks_of
from instep.training.batches import progress
from instep.training.buckets.bucket_sets import BucketSets, has_user_hooks
from instep.training.buckets.bucket_sums import finish_buckets
from instep.training.buckets.checksum import LENGTH, STEPS, bucket_checksum, verify_checksum
from instep.training.buckets.codec import as_real
from instep.training.buckets.compression import Compression
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.sparse_sums import all_reduce_sparse, sum_table
from instep.training.buckets.weight_factors import Factors, are_small_for, no_factors
from instep.training.drift.comparison import DriftCheck
from instep.training.drift.non_finite import FiniteCheck, zero_non_finite
from instep.training.errors import DriftError, MixedSumsError

reducer_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The reducer of each parameter."""


class BackwardState:
    """One backward on this rank, as the reducers need it."""

    def __init__(
        self,
        *,
        is_placeholder: bool,
        sync: bool,
        has_no_number: bool = False,
        finite_check: FiniteCheck | None = None,
    ) -> None:
        self.is_placeholder = is_placeholder
        """Whether this rank has no rows: its gradients count as zeros, whatever was computed."""
        self.has_no_number = has_no_number
        """Whether this rank's loss, a mean over nothing, is no number and has the weight 0."""
        self.sync = sync
        """Whether gradients are summed over the ranks now; False inside of `no_sync`."""
        self.finite_check = finite_check
        """Looks at this rank's gradients before they are summed."""
        self.reducers: dict[Reducer, None] = {}
        """Those of the parameters that it has reached."""


_current = ProcessValue[BackwardState | None](None)
_unfinished: dict[Reducer, None] = {}
"""Those with parts of sums that are still to be made: the next backward that sums makes them,
whether it reaches their parameters or not."""
_reducer_numbers = count()
"""All ranks make their reducers in the same order."""


def is_reducing() -> bool:
    """Whether gradients of a backward are being collected now."""
    return _current.value is not None


@contextmanager
def reduce_during_backward(backward: BackwardState) -> Iterator[None]:
    """While autograd runs inside, gradients are collected; at the end `.grad` holds the sums."""
    with _current.set_to(backward):
        try:
            yield
            if backward.sync:
                for reducer in sorted(_unfinished, key=lambda each: each.number):
                    reducer.join(backward)
            for reducer in backward.reducers:
                reducer.finish(backward)
        finally:
            for reducer in backward.reducers:
                reducer.reset()


class Reducer:
    """Sums the gradients of some parameters over the ranks, bucket by bucket, during backward."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        compression: Compression = None,
        drift_check: DriftCheck | None = None,
        tables: Iterable[Tensor] = (),
    ) -> None:
        """`tables`: parameters whose gradients are sparse, where a rank has rows for them."""
        self.transport = transport
        self.drift_check = drift_check
        """Compares the model that has these parameters."""
        # Batch normalisation sends its own messages in between, and at which point of backward a
        # bucket is full depends on which parameters this rank has used.
        self._bucket_transport = overlap_group(transport)
        self.number = next(_reducer_numbers)
        """Equal on all ranks."""
        self._before = progress.current.counts()
        self._progress = 0, 0, 0
        """In this backward: the last batch's epoch, and how many were left out and requested."""
        # Backward reaches the last parameters first.
        self._parameters = list(reversed(parameters))
        self._index_of = {id(each): index for index, each in enumerate(self._parameters)}
        self._bucket_sets = BucketSets(
            self._parameters, self._bucket_transport, self.number, compression
        )
        self._bucket_of: Mapping[int, GradBucket] = {}
        self._buckets: Sequence[GradBucket] = ()
        self._started = 0
        self._partial: set[int] = set()
        """Parameters whose `.grad` is this rank's part of a sum that is still to be made."""
        of_tables = set(map(id, tables))
        self._tables = [k for k, p in enumerate(self._parameters) if id(p) in of_tables]
        self._of_tables: dict[int, Tensor | None] = {}
        """What `.grad` was before this backward, of the tables of which it has a gradient."""
        self._sparse: set[int] = set(self._tables)
        self._reduced: set[int] = set()
        """Parameters whose gradients of this backward were summed at once."""
        self._more: dict[int, Tensor] = {}
        """The sums of what parameters have got in this backward beside their first gradients."""
        self._checksums: dict[int, Tensor] = {}
        """The summed checksums of what was summed at once."""
        self._hooks: list[_Hook] = []
        for index, parameter in enumerate(self._parameters):
            reducer_of[parameter] = self
            self._hooks.append(_Hook(self, index, parameter))
        if drift_check is not None:
            drift_check.note_own(parameters)

    def join(self, backward: BackwardState) -> None:
        """Take part in this backward."""
        if self not in backward.reducers:
            backward.reducers[self] = None
            requested, left_out = map(sub, progress.current.counts(), self._before)
            self._progress = progress.current.epoch, left_out, requested
            self._choose_buckets()

    def collect(self, index: int, grad: Tensor) -> Tensor | None:
        """Autograd calls this with a parameter's gradient of this backward."""
        backward = _current.value
        assert backward is not None
        self.join(backward)
        if backward.is_placeholder:
            grad = torch.zeros_like(grad)
        elif backward.has_no_number:
            grad = zero_non_finite(grad)
        if not (backward.sync or has_user_hooks(self._parameters[index])):
            self._accumulate(index)
            return grad
        if grad.is_sparse and index in self._tables and not has_user_hooks(self._parameters[index]):
            self._intercept_table(index)
            return grad
        bucket = self._bucket_of.get(index)
        if bucket is None or grad.is_sparse or not backward.sync:
            return self._reduce_now(index, grad)
        if index in bucket.filled:  # as where a reentrant checkpoint has a backward of its own
            add = self._sum_again if bucket.starts_early else bucket.add_again
            add(index, grad)  # not by whether it has started, which may differ between ranks
            return grad
        bucket.intercept(index, grad, partial=index in self._partial)
        self._start_full_buckets(backward)
        return grad

    def takes_factors(self, weight: Tensor, rows: int) -> bool:
        """Whether `collect_factors` may take a gradient that is a sum over so many rows."""
        return self._bucket_transport.in_place and are_small_for(rows, weight, self.transport.size)

    def collect_factors(self, weight: Tensor, factors: Factors) -> bool:
        """Take a weight's gradient of this backward, which autograd then must not accumulate;
        False where it must."""
        backward = _current.value
        if backward is None or not backward.sync or backward.has_no_number:
            return False
        self.join(backward)
        index = self._index_of[id(weight)]
        bucket = self._bucket_of.get(index)
        if bucket is None or index in self._partial:
            return False
        if backward.is_placeholder:
            factors = no_factors(weight)
        return bucket.add_factors(index, factors, self.transport.size)

    def finish(self, backward: BackwardState) -> None:
        """The backward has ended: start the other buckets, wait, write the sums into `.grad`."""
        if backward.sync:
            self._sum_tables()
            self._add_accumulated()
        with self._explained_mismatch():
            self._verify_checksums()
            if not backward.sync:
                return
            self._inspect(self._buckets[self._started :], backward, are_last=True)
            finish_buckets(self._buckets, self._started, self._bucket_transport, self._reduced)
        for index, total in self._more.items():
            grad = self._parameters[index].grad
            assert grad is not None
            grad.add_(total)
        self._started = len(self._buckets)
        self._partial.clear()
        _unfinished.pop(self, None)

    def reset(self) -> None:
        """Forget this backward."""
        self._started = 0
        self._reduced.clear()
        self._more.clear()
        self._of_tables.clear()
        self._checksums.clear()
        for bucket in self._buckets:
            bucket.reset()

    def has_partial_grad(self, parameter: Tensor) -> bool:
        """Whether `.grad` is this rank's part of a sum that is still to be made."""
        return any(self._parameters[index] is parameter for index in self._partial)

    def _choose_buckets(self) -> None:
        """A backward has reached the first parameter: take the buckets for what is trained now."""
        chosen = self._bucket_sets.choose(self._sparse)
        self._buckets, self._bucket_of = chosen.buckets, chosen.bucket_of
        for bucket in self._buckets:
            bucket.set_step(self._step_number)

    @property
    def _step_number(self) -> int:
        """Different on ranks whose progress differs by a few batches or one epoch."""
        epoch, left_out, requested = self._progress
        return (left_out + 5 * requested + epoch * (STEPS // 2)) % STEPS

    @contextmanager
    def _explained_mismatch(self) -> Iterator[None]:
        """Raise DriftError where ranks have summed different gradients since they are in different
        steps. Collective then: all ranks find out at the same sum."""
        try:
            yield
        except MixedSumsError:
            of_ranks = self.transport.all_gather_object(self._progress)
            errors = DriftError.of_epochs, DriftError.of_left_out, DriftError.of_backwards
            for error, *numbers in zip(errors, *of_ranks, strict=True):
                if len({*numbers}) > 1:
                    raise error(group_ranks(numbers)) from None
            raise

    def _reduce_now(self, index: int, grad: Tensor) -> Tensor:
        """The sum over ranks, at once: for the user's hooks, which must see it, and for sparse
        gradients, which do not travel in buckets."""
        parameter = self._parameters[index]
        if index in self._partial and parameter.grad is not None:
            grad = grad + parameter.grad
            parameter.grad = None
        self._partial.discard(index)
        self._reduced.add(index)
        if grad.is_sparse:
            self._sparse.add(index)  # from the next backward on it has no place in a bucket
            return all_reduce_sparse(grad)
        return self._sum_over_ranks(index, grad)

    def _sum_again(self, index: int, grad: Tensor) -> None:
        """Sum another gradient of a parameter whose first one is in a bucket."""
        self._more[index] = self._more.get(index, 0) + self._sum_over_ranks(index, grad)

    def _sum_over_ranks(self, index: int, grad: Tensor) -> Tensor:
        checksum = bucket_checksum(grad, self.number, index, step=self._step_number)
        flat = torch.cat([grad.reshape(-1), checksum])
        with recorder.with_detail(_describe_hook(self._parameters[index])):
            self.transport.all_reduce(as_real(flat), "sum").wait()
        self._checksums[index] = flat[-LENGTH:]
        return flat[:-LENGTH].view(grad.shape)

    def _intercept_table(self, index: int) -> None:
        """Autograd adds this rank's gradient of a table to what is in `.grad` of the same sum."""
        if index in self._of_tables:
            return
        parameter = self._parameters[index]
        self._of_tables[index] = None
        if index not in self._partial:
            self._of_tables[index], parameter.grad = parameter.grad, None

    def _sum_tables(self) -> None:
        """Sum the gradients of the tables, of which some ranks may have none, into `.grad`."""
        for index in self._tables:
            parameter = self._parameters[index]
            if index in self._reduced or not parameter.requires_grad or has_user_hooks(parameter):
                continue
            is_partial = index in self._partial
            has_grad = is_partial or index in self._of_tables
            before = self._of_tables.get(index) if has_grad else parameter.grad
            total = sum_table(parameter.grad if has_grad else None, parameter)
            self._partial.discard(index)
            if has_grad or not total.is_sparse or total._nnz():
                parameter.grad = total if before is None else before + total

    def _verify_checksums(self) -> None:
        """Raise MixedSumsError where ranks have summed different parameters at once."""
        for index, total in self._checksums.items():
            shape = tuple(self._parameters[index].shape)
            verify_checksum(total, MixedSumsError.of_hooked(shape))

    def _accumulate(self, index: int) -> None:
        """Without sums: `.grad` becomes this rank's part of the sum.

        The sum that was there is the same on all ranks, so an N-th of it is this rank's part.
        """
        _unfinished[self] = None
        if index not in self._partial:
            self._partial.add(index)
            grad = self._parameters[index].grad
            if grad is not None:
                grad.div_(self.transport.size)

    def _start_full_buckets(self, backward: BackwardState) -> None:
        """Start the buckets that are full, in an order that is the same on all ranks."""
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if not (bucket.starts_early and bucket.is_full):
                return
            self._inspect([bucket], backward, are_last=bucket is self._buckets[-1])
            bucket.start(self._bucket_transport)
            self._started += 1

    def _inspect(
        self, buckets: Sequence[GradBucket], backward: BackwardState, *, are_last: bool
    ) -> None:
        """Look for what is not finite, before these buckets are summed."""
        if backward.finite_check is not None:
            accumulated = bool(self._partial)
            backward.finite_check.inspect(buckets, are_last=are_last, accumulated=accumulated)

    def _add_accumulated(self) -> None:
        """Add what only earlier backwards, without sums, have computed."""
        for index in sorted(self._partial):
            parameter = self._parameters[index]
            grad = parameter.grad
            if grad is None:
                continue
            if index not in self._bucket_of:
                parameter.grad = None
                parameter.grad = self._reduce_now(index, grad)
            elif index not in self._bucket_of[index].filled:
                self._bucket_of[index].add_accumulated(index)


class _Hook:
    """Autograd calls this with a parameter's gradient. Does nothing outside of our backwards."""

    def __init__(self, reducer: Reducer, index: int, parameter: nn.Parameter) -> None:
        self._reducer, self._index = reducer, index
        frozen = not parameter.requires_grad
        parameter.requires_grad_()  # a hook needs it; a frozen parameter may thaw later
        handle = parameter.register_hook(self)
        parameter.requires_grad_(not frozen)
        # Before the user's hooks, which must see the sum.
        hooks_of(parameter).move_to_end(handle.id, last=False)

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        # None: from a function that gives no gradient. Without a backward: torch.autograd.grad,
        # where the value goes to the user.
        if grad is None or _current.value is None:
            return None
        return self._reducer.collect(self._index, grad)


def _describe_hook(parameter: nn.Parameter) -> str:
    """What a sum is for that is made on the spot: "gradient for the hook at train.py:9"."""
    own = [each for each in hooks_of(parameter).values() if not isinstance(each, _Hook)]
    hooks = [*own, *(later_hooks_of(parameter) or {}).values()]
    if not hooks:
        return "gradient"
    code = getattr(hooks[0], "__code__", None)
    if code is None:  # it is an object, or written in C
        return f"gradient for the hook {getattr(hooks[0], '__name__', type(hooks[0]).__name__)}"
    return f"gradient for the hook at {Path(code.co_filename).name}:{code.co_firstlineno}"


def partial_sums() -> list[Tensor]:
    """The parameters whose `.grad` is this rank's part of a sum that is still to be made."""
    return [each._parameters[index] for each in _unfinished for index in each._partial]
