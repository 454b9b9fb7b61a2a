"""Sums and means that a forward computes itself, over the rows of the whole batch.

A masked mean, `(loss * mask).sum() / mask.sum()`, is neither the mean nor the sum of those of the
ranks. Where a module's outputs are not those of the whole batch for such a reason, it is tried once
more with sums that go over all ranks; for a loss of torch.nn.functional they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.shards.node_names import named_as_mean
from instep.unedited.sharded_call.shards.reductions import (
    SUMS,
    Answer,
    Place,
    ReductionCall,
    replaced_reductions,
)

_HALF = (torch.float16, torch.bfloat16)


class RowSums:
    """Which sums and means over a first dimension go over the rows of the batch: not those of a
    vector with an entry for each class, say. Where the whole forward is known, its tensor there is
    as long as that of the sharded one."""

    def __init__(
        self,
        whole_lengths: Mapping[Place, set[int]] | None = None,
        without_rows: Iterable[Place] = (),
        *,
        only_floats: bool = False,
    ) -> None:
        """`whole_lengths` while a sharded forward is compared with the whole one; `without_rows`
        afterwards. `only_floats`: counts are of this rank's rows, as those by which a layer hands
        its rows to experts."""
        self._whole_lengths, self._only_floats = whole_lengths, only_floats
        self._without_rows = set(without_rows)
        self._with_rows: set[Place] = set()

    def has_rows(self, place: Place, tensor: Tensor) -> bool:
        """Whether the first dimension of what is added up there has the rows of the batch."""
        if self._whole_lengths is None:
            return place not in self._without_rows
        is_count = self._only_floats and not tensor.is_floating_point()
        is_own = is_count or len(tensor) in self._whole_lengths.get(place, ())
        (self._without_rows if is_own else self._with_rows).add(place)
        return not is_own

    @property
    def without_rows(self) -> frozenset[Place] | None:
        """The places of those that do not; None if some of a place do and others do not."""
        if self._without_rows & self._with_rows:
            return None
        return frozenset(self._without_rows)

    def same_places(self, transport: Transport) -> frozenset[Place]:
        """`without_rows`, if they are the same on all ranks. Collective.

        Raises ShardedCallError where they are not.
        """
        by_rank = transport.all_gather_object(self.without_rows)
        first = by_rank[0]
        if first is None or any(each != first for each in by_rank):
            raise ShardedCallError("some of its sums go over rows in some calls only")
        return first


def over_all_rows(add_up: Callable[[Tensor], Tensor], row_sums: RowSums) -> Answer:
    """Sums and means over the rows of all ranks, if `add_up` gives the sum over ranks."""

    def answer(call: ReductionCall) -> Any:
        tensor = call.tensor
        if not (call.is_over_first_dim() and row_sums.has_rows(call.place, tensor)):
            return NotImplemented
        if call.name == "sum":
            return add_up(call.run())
        exact = tensor.float() if tensor.dtype in _HALF else tensor  # a sum may be too large
        sums = exact.sum(*call.args, **call.kwargs)
        count = sums.new_full((1,), tensor.numel() // max(1, sums.numel()))
        total = add_up(torch.cat((sums.reshape(-1), count)))
        mean = total[:-1].view(sums.shape) / total[-1]
        return named_as_mean(mean.to(call.kwargs.get("dtype") or tensor.dtype), sums)

    return answer


def replaced_sums(answer: Answer) -> AbstractContextManager[None]:
    """Inside, on this thread, `answer` gets the sums and means of functions that are neither
    torch's own nor instep's."""
    return replaced_reductions(answer, SUMS)
