"""Truth values of all rows by which a forward takes a branch: `if x.max() > 50:`, or
`if len(chosen) > 8:`.

A part of the batch may have another one than the whole batch has, in the first call that any of
them takes that branch. So a forward that reads one in the condition of a branch which matters is
not divided. What is computed from a reduction over the rows is followed through all operations,
and of the rows that were chosen by their values their number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from instep.process.patching import replaced
from instep.process.torch_private.tensors import tree_leaves
from instep.unedited.sharded_call.compare.probes.branches import SIZES
from instep.unedited.sharded_call.compare.probes.recorded_operations import (
    OperationPlace,
    RecordedOperation,
)
from instep.unedited.sharded_call.compare.probes.row_reads import RowReads

_READING = "aten::_local_scalar_dense"
_INDEXING = frozenset(("aten::index", "aten::index_select", "aten::gather"))
_CHOOSING = frozenset(
    ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::_unique")
)
"""Operations whose results have a size that depends on values."""


class KnownTensors:
    """Some tensors, as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, ref[Tensor]] = {}

    def add(self, values: Any) -> None:
        """Add the tensors in there."""
        for each in tree_leaves(values):
            if isinstance(each, Tensor):
                self._known[id(each)] = ref(each)

    def have(self, values: Any) -> bool:
        """Whether one of the tensors in there is among these."""
        return bool(self._known) and any(
            isinstance(each, Tensor)
            and (found := self._known.get(id(each))) is not None
            and found() is each
            for each in tree_leaves(values)
        )


class RowWideValues:
    """What a forward computes from reductions over its rows, and where it reads that."""

    def __init__(self, reads: RowReads) -> None:
        self._tensors, self._chosen = KnownTensors(), KnownTensors()
        self._single: dict[OperationPlace, KnownTensors] = {}
        """Those of one row, and what is computed from them."""
        self._reads = reads

    def add(self, results: Any) -> None:
        """Note that these tensors are computed from all rows."""
        self._tensors.add(results)

    def note_operation(self, seen: RecordedOperation) -> None:
        """Follow them through an operation."""
        name, *_ = seen.place
        if self._tensors.have((seen.args, seen.kwargs)):
            if name == _READING:
                self.note_read(seen.frame)
            else:
                self._tensors.add(seen.result)
        for place, tensors in self._single.items():
            if tensors.have((seen.args, seen.kwargs)):
                if name == _READING and seen.frame is not None:
                    self._reads.note_of_row(seen.frame, place)
                else:
                    tensors.add(seen.result)
        if (seen.is_view or name in _INDEXING) and self._chosen.have(seen.args):
            self._chosen.add(seen.result)

    def note_row(self, seen: RecordedOperation) -> None:
        """Note an operation that takes one row, or as many of a part of the batch as of all."""
        self._single.setdefault(seen.place, KnownTensors()).add(seen.result)

    def note_choice(self, seen: RecordedOperation) -> None:
        """Note an operation on the rows that may choose some by their values."""
        name, *_ = seen.place
        by_truth = name in _INDEXING and any(
            isinstance(each, Tensor) and each.dtype is torch.bool
            for each in tree_leaves(seen.args[1:])
        )
        if by_truth or name in _CHOOSING:
            self._chosen.add(seen.result)

    @contextmanager
    def reading_sizes(self) -> Iterator[None]:
        """Inside, it is noted where the number of chosen rows is read."""

        def noting(method: Any) -> Any:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if self._chosen.have(tensor):
                    self.note_read(sys._getframe(1))
                return method(tensor, *args, **kwargs)

            return read

        methods = [(Tensor, name, noting(getattr(Tensor, name))) for name in SIZES]
        descriptor: Any = Tensor.shape
        shape = property(noting(descriptor.__get__))
        with replaced(*methods, (Tensor, "shape", shape)):
            yield

    def note_read(self, frame: FrameType | None) -> None:
        """Note that the code of this frame reads one."""
        if frame is not None:
            self._reads.note_of_all(frame)
