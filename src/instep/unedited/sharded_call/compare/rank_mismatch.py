"""Whether all ranks of an unedited script make the same call, and what rules out its division.

They do unless the script takes numbers from the clock, from a process id or from another source
that no seed reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from instep.distributed.communication.tensors import as_bytes
from instep.distributed.communication.transport import Transport
from instep.training.pytree import is_column
from instep.unedited.sharded_call.plan.division import values_in
from instep.unedited.sharded_call.plan.module_state.module_properties import find_user_of_data
from instep.unedited.sharded_call.plan.whole_reasons import ReasonKind, WholeReason
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.run.tensor_subclasses import as_plain

_CLOCK = "a seed from the clock"
_LENGTH, _DIRECTIONS = 1 << 16, 4
_BUFFERS = "its buffers are"
_PARAMETERS = "its parameters are"
_ARGUMENTS = "it is called with arguments that are"


def first_mismatch(
    module: nn.Module, leaves: Sequence[Any], transport: Transport
) -> WholeReason | None:
    """Say what is not the same on all ranks; None if all is. Collective.

    Args:
        leaves: the arguments of the call.
    """
    buffers = dict(module.named_buffers())
    parts = {
        _PARAMETERS: [*nn.Module.parameters(module)],
        _ARGUMENTS: [*chain.from_iterable(map(values_in, leaves))],
        _BUFFERS: [*buffers.values()],
    }
    found = _mismatch(parts, transport)
    if found is None:
        return None
    what, place, rank = found
    if what != _BUFFERS or place is None:
        by_data = find_user_of_data(module) if what == _PARAMETERS else ""
        return WholeReason(_difference(what, rank, f"`.data` in {by_data}" if by_data else _CLOCK))
    return WholeReason(
        f"its buffer {[*buffers][place]} is not the same on rank {rank} as on rank 0 (memory that "
        "torch.empty has left as it was, or another thing that differs between processes?)",
        ReasonKind.UNLIKE_BUFFERS,
    )


def arguments_mismatch(leaves: Sequence[Any], transport: Transport) -> str | None:
    """As the text of `first_mismatch`, of the arguments alone. Collective."""
    found = _mismatch({_ARGUMENTS: [*chain.from_iterable(map(values_in, leaves))]}, transport)
    return None if found is None else _difference(found[0], found[2])


def _difference(what: str, rank: int, cause: str = _CLOCK) -> str:
    return (
        f"{what} not the same on rank {rank} as on rank 0 "
        f"({cause}, or another thing that differs between processes?)"
    )


def _mismatch(
    parts: Mapping[str, Sequence[Any]], transport: Transport
) -> tuple[str, int | None, int] | None:
    """Which of the parts is not the same on all ranks, the number of its first value that is not,
    and on which rank. Collective."""
    mine = [list(map(_summary, values)) for values in parts.values()]
    by_rank = transport.all_gather_object(mine)
    for k, what in enumerate(parts):
        first = by_rank[0][k]
        for rank, theirs in enumerate(by_rank):
            if len(theirs[k]) != len(first):
                return what, None, rank
            pairs = enumerate(zip(theirs[k], first, strict=True))
            places = [place for place, (own, other) in pairs if not own.matches(other)]
            if places:
                return what, places[0], rank
    return None


def first_reason(reason: WholeReason | None, transport: Transport) -> WholeReason | None:
    """The first of the ranks' reasons; None if no rank has one. Collective.

    A file that the first rank has written, or a clock, may let one rank's forward print and
    another's not.
    """
    return next(filter(None, transport.all_gather_object(reason)), None)


@dataclass(frozen=True)
class _Summary:
    """A short description of a value, by which ranks compare it."""

    exact: object
    norm: float = 0.0
    projections: tuple[float, ...] = ()
    """On a few random directions: two tensors' differ by about as much as the tensors do."""
    tolerance: float = 0.0
    """Of a difference, relative to the norm. Ranks may round differently what each computes for
    itself: on unlike processors, or on GPUs, whose sums have no fixed order."""

    def matches(self, other: _Summary) -> bool:
        limit = self.tolerance * max(self.norm, other.norm)
        return self.exact == other.exact and all(
            abs(mine - theirs) <= limit
            for mine, theirs in zip(self.projections, other.projections, strict=True)
        )


def _summary(value: Any) -> _Summary:
    """The summary of a tensor, an array or a plain number; of a sharded output there are no
    copies."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        if value.dtype.kind in "fc" and value.dtype.isnative and value.dtype.itemsize <= 16:
            with suppress(TypeError):  # of a dtype that torch has not
                return _summary(torch.tensor(value, device="cpu"))
        bits = crc32(np.ascontiguousarray(value).view(np.uint8).data) if value.size else 0
        return _Summary((value.shape, value.dtype.str, bits))
    if isinstance(value, bool | int | float | str) or is_column(value):
        return _Summary(repr(value))
    if not isinstance(value, Tensor) or isinstance(value, ShardedOutput):
        return _Summary(type(value).__name__)
    exact: tuple[object, ...] = (tuple(value.shape), str(value.dtype))
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return _Summary(exact)
    flat = as_plain(value).detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        # Of a copy: what has been a numpy array cannot be resized, as quantization's buffers are.
        return _Summary((*exact, crc32(flat.cpu().clone().view(torch.uint8).numpy().data)))
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    is_finite = flat.isfinite()
    if not is_finite.all():  # as in a causal mask
        others = flat.where(~is_finite, torch.zeros_like(flat))
        exact = (*exact, crc32(as_bytes(others).cpu().numpy().data))
        flat = flat.where(is_finite, torch.zeros_like(flat))
    tolerance = torch.finfo(flat.dtype).eps ** 0.5
    return _Summary(exact, *_project(flat), tolerance=tolerance)


def _project(flat: Tensor) -> tuple[float, tuple[float, ...]]:
    """The norm, and the projections on a few directions; no copy of all of it."""
    directions = _directions().to(flat.device)
    sums = directions.new_zeros(1 + directions.shape[1])
    for part in flat.split(len(directions)):
        values = part.double()
        sums[0] += values.dot(values)
        sums[1:] += values @ directions[: len(values)]
    square, *projections = sums.tolist()
    return square**0.5, tuple(projections)


@cache
def _directions() -> Tensor:
    """float64, each entry +1 or -1."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (_LENGTH, _DIRECTIONS), generator=generator, device="cpu")
    return (2 * bits - 1).double()
