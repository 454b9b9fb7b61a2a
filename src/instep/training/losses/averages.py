"""Losses whose gradients Horovod or DDP averages over ranks, where `instep.shard` divides batches.

An average gives each rank the same weight, though ranks may have unequal numbers of rows. So
backward gives the loss its weight: that of its rows if it is a mean over them, and that which
`instep.weight` has stated. A sum has none: its average does not depend on how rows are divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.transport import Transport
from instep.training import forward_calls
from instep.training.autograd_graph import Root, saved_tensors
from instep.training.batches import progress
from instep.training.batches.candidates import BatchCandidates
from instep.training.batches.registry import find_block, find_candidates, has_manual_batches
from instep.training.blocks import Block
from instep.training.errors import MixedBatchesError
from instep.training.forward_calls import current_candidates, find_leaves
from instep.training.losses.divisors import LastDivisors, find_averaged, have_weight_of_rows

_unchecked: WeakSet[GradientAverage] = WeakSet()
"""Those of whose losses the divisors were not compared in any batch."""


@dataclass(eq=False)
class GradientAverage:
    """How the gradients of one optimizer or model are combined."""

    is_of_all_ranks: bool = True
    is_mean: bool = True
    """Whether their sum is divided by the number of ranks."""
    is_checked_uneven: bool = False
    """Whether the divisors of its losses were compared in a batch that is divided unevenly."""
    has_weight_of_rows: bool = True
    """Whether the last loss that divided sums by numbers had it."""
    last_divisors: LastDivisors | None = None
    """What its losses have divided by, when that was compared last."""

    def __post_init__(self) -> None:
        _unchecked.add(self)


externally_averaged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters whose gradients Horovod or DDP averages over ranks, with their GradientAverage."""
_forwards: dict[tuple[Block | None, ...], BatchCandidates] = {}
"""The batches of the models' forwards since the last one that had a backward."""


class _NextBackward:
    """What is known of the next backward."""

    stated: float | None = None
    """This rank's fraction of its loss, if `instep.weight` has stated it."""
    loaded: int | None = None
    """How many batches had been loaded at the first backward after these; None before it."""


_next = _NextBackward()


def state_weight(fraction: float) -> None:
    """The next backward of gradients that are averaged has this rank's fraction of its loss."""
    _next.stated = fraction


def note_forward(inputs: object) -> None:
    """A model whose gradients are averaged is called with these."""
    candidates = find_candidates(inputs)
    if not torch.is_grad_enabled():
        return
    if _next.loaded is not None:
        _forwards.clear()
        _next.loaded = None
    _forwards[candidates.blocks] = candidates


def batch() -> BatchCandidates:
    """The batch of the forwards before this backward; the one in use now if they show none."""
    return next(iter(_forwards.values())) if len(_forwards) == 1 else current_candidates()


def may_need_weight() -> bool:
    """Whether the next backward's loss may need a weight. Not collective."""
    if not externally_averaged:
        return False
    if _next.loaded not in (None, progress.current.loaded):
        _forwards.clear()  # it is of another batch, and no forward has told which
    _next.loaded = progress.current.loaded
    candidates = batch()
    if not candidates.is_single:
        return True
    (block,) = candidates.blocks
    if block is None:
        return False
    return _next.stated is not None or _is_uneven(block) or bool(_unchecked) or has_manual_batches()


def zero_if_placeholder(grad: Tensor) -> Tensor | None:
    """Zeros on a rank without rows, which computes the gradient of a placeholder."""
    call = forward_calls.current()
    return torch.zeros_like(grad) if call is not None and call.is_placeholder else None


def find_weight(roots: tuple[Root, ...], transport: Transport) -> tuple[Block, float] | None:
    """This rank's rows of the batch of a backward, and the weight of its loss in the average; None
    if no averaged gradient is computed.

    Collective where it is not told by this rank's graph alone.
    """
    leaves = find_leaves(roots)
    found = {externally_averaged[each] for each in leaves if each in externally_averaged}
    block = _batch_of(roots).resolve() if found else None
    return None if block is None else (block, _weight(found, roots, block, transport))


def _batch_of(roots: tuple[Root, ...]) -> BatchCandidates:
    """The batch of a backward from `roots`: of several, the one whose tensors the graph has saved.

    Raises MixedBatchesError where it has saved those of two, of which this rank has other
    fractions.
    """
    candidates = batch()
    if candidates.is_single:
        return candidates
    saved = saved_tensors(roots)
    blocks = [block for each in saved if (block := find_block(each)) is not None]
    if not blocks:
        parameters = {_address(parameter) for parameter in externally_averaged}
        inputs = [each for each in saved if each.dim() and _address(each) not in parameters]
        return replace(candidates, rows=frozenset(each.shape[0] for each in inputs))
    if len({block.fractions() for block in blocks}) > 1:
        fractions = dict.fromkeys(block.fraction for block in blocks)
        raise MixedBatchesError([*fractions], are_stated=True)
    return BatchCandidates((blocks[0],))


def _address(tensor: Tensor) -> int:
    """The address of a tensor's memory, the same for all its views."""
    is_dense = tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if is_dense else id(tensor)


def _weight(
    found: set[GradientAverage], roots: tuple[Root, ...], block: Block, transport: Transport
) -> float:
    if _next.stated is not None:
        fraction, _next.stated = _next.stated, None
        return fraction * (block.size if all(each.is_mean for each in found) else 1)
    is_uneven = _is_uneven(block)
    is_due = _note_check(found, is_uneven)
    if not (is_uneven or is_due):
        return 1.0
    divisors = find_averaged(roots, max(block.count, 1))
    rows = block.count * block.size / block.total if block.total else 0.0
    if divisors and all(each.value is None for each in divisors):
        return 1.0
    divides_sums = any(each.is_of_sum and each.value is not None for each in divisors)
    if not (is_due or divides_sums) or not all(each.is_of_all_ranks for each in found):
        return rows
    last = next(each.last_divisors for each in found)
    has_rows, last = have_weight_of_rows(divisors, block, last, transport)
    for each in found:
        each.last_divisors = last
        if has_rows is None:
            has_rows = each.has_weight_of_rows
        elif is_uneven and divides_sums:
            each.has_weight_of_rows = has_rows
    return rows if has_rows else 1.0


def _note_check(found: set[GradientAverage], is_uneven: bool) -> bool:
    """Whether the divisors are compared now: at the first batch of each kind."""
    is_due = any(not each.is_checked_uneven if is_uneven else each in _unchecked for each in found)
    _unchecked.difference_update(found)
    for each in found:
        each.is_checked_uneven |= is_uneven
    return is_due


def _is_uneven(block: Block) -> bool:
    return block.count * block.size != block.total
