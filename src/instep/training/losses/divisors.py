"""What a loss divides by, read from its graph: a warning where that is not the rank's rows.

A rank's loss has the weight of its rows, unless `instep.weight` states what it divides by instead:
the sum of class weights, the tokens that are kept, or nothing. PyTorch's nodes have these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.autograd.graph import GradientEdge

from instep.distributed.communication.transport import Transport
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.distributed.numbers import gather_values
from instep.distributed.watchdog.call_stack import script_line
from instep.training.autograd_graph import Root, next_nodes, node_of
from instep.training.blocks import Block
from instep.training.forward_calls import depends_on_call, find_leaves

_LINEAR = ("Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Unsqueeze", "Clone")
_ELEMENTWISE = ("Mul", "Div", "Exp", "Log", "Pow", "Sqrt", *_LINEAR)
_OF_PARAMETERS = ("Abs", "Cat", "T", "Transpose", "LinalgVectorNorm", "Norm", "Sum", "Stack")
"""What penalties on parameters are computed by, too."""
_SUM, _MEAN = 2, 1
"""What torch's losses save as their reduction."""
_NONE = -1.0
_warned: set[tuple[str, str]] = set()
_met_uneven: WeakSet[object] = WeakSet()
"""The replicas that have had a batch of which the ranks have different numbers of rows."""
_met_other_size: WeakSet[object] = WeakSet()
"""Those that have had one of another size than one before."""
_suspected: WeakSet[object] = WeakSet()
"""The replicas of whose loss the last backward had a sum that is divided by the whole batch's rows,
and no gradients to add to."""
_last_of: WeakKeyDictionary[object, LastDivisors] = WeakKeyDictionary()


@dataclass(frozen=True)
class Divisor:
    """What a term of a loss divides by."""

    value: float | None
    """None for a sum that is not divided."""
    is_of_sum: bool = False
    """Whether the term is a sum, divided or not, and no mean."""
    is_by_whole: bool = False
    """Whether it is one that is divided by the rows of the whole batch: by the batch size, or by
    this rank's rows and as many batches as there are ranks."""


@dataclass(frozen=True)
class LastDivisors:
    """What a loss has divided by in the last batch in which that was compared."""

    total: int
    """The rows of the batch."""
    rows: int
    """Those of this rank."""
    numbers: tuple[float, ...]
    """The least and the greatest of them."""

    def have_constant(self, found: list[Divisor], rows: int) -> bool:
        """Whether this rank now has other rows, and its sums are divided by the same numbers."""
        numbers = _bounds(_numbers(found))
        is_same = bool(self.numbers) and numbers == self.numbers
        has_rows = rows > 0 and self.rows > 0
        return has_rows and is_same and rows != self.rows and all(d.is_of_sum for d in found)


def may_be_by_whole(replica: object) -> bool:
    """Whether the divisors of the replica's next loss are to be compared."""
    return replica in _suspected


def is_first_of_kind(replica: object, block: Block) -> bool:
    """Whether this is the replica's first batch of which the ranks have different numbers of rows,
    or the first one of another size than the one that was compared last.

    There a sum that is divided by a constant shows; elsewhere it looks like a mean over columns.
    """
    is_uneven = not block.has_empty_ranks and block.total % block.size > 0
    last = _last_of.get(replica)
    is_other = last is not None and last.total != block.total
    is_first = (is_uneven and replica not in _met_uneven) or (
        is_other and replica not in _met_other_size
    )
    if is_uneven:
        _met_uneven.add(replica)
    if is_other:
        _met_other_size.add(replica)
    return is_first


def check_divisors(
    replica: object,
    roots: Iterable[Root],
    block: Block,
    transport: Transport,
    parameters: Container[Tensor],
) -> None:
    """Warn, once for each line, of a loss that is no mean over rows.

    Args:
        replica: which the loss comes from.
        roots: on which backward is called.
        block: this rank's rows. A sum of other than so many elements as the whole batch has rows
            that is divided by so much is one over rows that is divided by the batch size, unless
            gradients are accumulated over several batches.
        parameters: those of replicas; one that has a gradient shows that they are.

    Collective.
    """
    rows, total = block.count, block.total
    whole = None if rows == total else (rows, total)
    found = _divisors_of(roots, whole) if rows else []
    ratios = [number / rows for number in _numbers(found)]
    sums_here = any(each.value is None for each in found)
    last = _last_of.get(replica)
    is_constant = last is not None and last.have_constant(found, rows)
    by_whole = any(each.is_by_whole for each in found)
    _last_of[replica] = LastDivisors(total, rows, _bounds(_numbers(found)))
    adds = by_whole and _have_gradients(roots, parameters)
    mine = [sums_here, is_constant, by_whole, adds, *(_bounds(ratios) or (_NONE, _NONE))]
    sums, constants, wholes, adding, *bounds = zip(*gather_values(mine, transport), strict=True)
    was_suspected = replica in _suspected
    _suspected.discard(replica)
    is_suspect = any(wholes) and not any(adding)
    if is_suspect and not was_suspected:
        _suspected.add(replica)  # the next backward shows whether gradients are accumulated
    if any(sums) or (is_suspect and was_suspected):
        _warn("is a sum over rows", "instep.weight(None)")
    elif any(constants) or any(_differ([e for e in bound if e != _NONE]) for bound in bounds):
        _warn_of_divisor()


def _have_gradients(roots: Iterable[Root], parameters: Container[Tensor]) -> bool:
    grads = (each.grad for each in find_leaves(roots) if each in parameters)
    return any(bool(each.any()) for each in grads if each is not None and not each.is_sparse)


def find_averaged(roots: Iterable[Root], rows: int) -> list[Divisor]:
    """What the terms of a loss divide by whose gradients are averaged, without penalties on the
    parameters. How many, and of what kind, depends on the script alone; `rows` are at least 1."""
    return _divisors_of(roots, None, lambda node: not _is_penalty(node), is_one_row=rows == 1)


def have_weight_of_rows(
    found: list[Divisor], block: Block, last: LastDivisors | None, transport: Transport
) -> tuple[bool | None, LastDivisors]:
    """Whether a rank's gradient has the weight of its rows in the average of a loss that divides by
    these: not if all ranks divide sums by the same number. None where ranks that have rows have
    equally many, and have not had others in the last batch that was compared.

    Returns that, and what the next call gets as `last`. Warns, once for each line, where the weight
    is another one. Collective.
    """
    rows = block.count
    numbers = _numbers(found) if rows else []
    ratios = [each / rows for each in numbers]
    is_constant = last is not None and last.have_constant(found, rows)
    mine = [
        is_constant,
        *(bound for e in (ratios, numbers) for bound in _bounds(e) or (_NONE,) * 2),
    ]
    constants, *gathered = zip(*gather_values(mine, transport), strict=True)
    bounds = [[each for each in bound if each != _NONE] for bound in gathered]
    in_proportion, equal = not any(map(_differ, bounds[:2])), not any(map(_differ, bounds[2:]))
    now = LastDivisors(block.total, rows, _bounds(numbers))
    if in_proportion and equal:
        return (False if any(constants) else None), now
    return _have_weight_of_rows(found, in_proportion, equal), now


def _have_weight_of_rows(found: list[Divisor], in_proportion: bool, equal: bool) -> bool:
    if in_proportion:
        return True
    if equal and all(each.is_of_sum for each in found):
        return False
    _warn_of_divisor()
    return True


def _bounds(numbers: list[float]) -> tuple[float, ...]:
    return (min(numbers), max(numbers)) if numbers else ()


def _numbers(found: list[Divisor]) -> list[float]:
    """The divisors other than 0 and infinity: a term that is multiplied by 0 divides by infinity,
    and by 0 where a loss is infinite."""
    values = (each.value for each in found)
    return [each for each in values if each and math.isfinite(each)]


def _differ(numbers: list[float]) -> bool:
    return any(not math.isclose(each, numbers[0], rel_tol=1e-5) for each in numbers)


def _warn_of_divisor() -> None:
    _warn(
        "does not divide by its rows (the ranks' divisors are not in proportion to their rows)",
        "instep.weight((y != ignore_index).sum()), for example; instep.weight(None), if it is "
        "a sum, also one that is divided by a constant",
    )


def _warn(what: str, call: str) -> None:
    line = script_line()
    if (line, what) not in _warned:
        _warned.add((line, what))
        warn_at_script_line(
            f"This line calls backward on a loss that {what}: the gradient is not that of one "
            f"process. State what it divides by, before backward: {call}. [INS716]"
        )


def _divisors_of(
    roots: Iterable[Root],
    whole: tuple[int, int] | None,
    counts: Callable[[Any], bool] = depends_on_call,
    is_one_row: bool = False,
) -> list[Divisor]:
    """What the terms of a loss divide by whose reduction `counts`, by default those that come from
    a replica. With the rows of this rank and of the `whole` batch, a sum that is divided by the
    latter, and not by the former and another number, counts as one that is not divided. For one row
    the sum of one number is a sum over rows, too, unless what it is computed from has a
    reduction."""
    found = []
    stack: list[tuple[Any, tuple[float, ...]]] = [(node_of(root), ()) for root in roots]
    seen = set()
    while stack:
        node, factors = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        each = _divisor_of(node, factors)
        if each is None and is_one_row and _sums_one_number(node):
            inner = [GradientEdge(child, 0) for child in _children(node)]
            if _divisors_of(inner, whole, counts, is_one_row):
                stack += [(child, factors) for child in _children(node)]
                continue
            each = _of_sum(factors)
        if each is not None:
            if counts(node) and not _reduces_stack(node):
                is_sum = whole is not None and _divides_by_whole(node, each, factors, *whole)
                found.append(replace(each, is_by_whole=True) if is_sum else each)
        elif node.name().startswith(("Mul", "Div")):
            other = node._saved_other
            if isinstance(other, Tensor) and other.numel() == 1:
                number = other.item() or math.inf
                factor = number if node.name().startswith("Div") or not other else 1 / number
                stack.append((next_nodes(node)[0], (*factors, factor)))
        elif node.name().startswith(_LINEAR):
            stack += [(child, factors) for child in next_nodes(node)]
    return found


def _divides_by_whole(
    node: Any, found: Divisor, factors: tuple[float, ...], rows: int, total: int
) -> bool:
    """Whether a sum over rows is divided by those of the whole batch: not where it is divided by
    this rank's and, for accumulation, by as many batches as there are ranks."""
    has_rows = any(math.isclose(each, rows) for each in factors)
    is_total = found.value == total != _summed_elements(node)
    return found.is_of_sum and is_total and not has_rows


def _of_sum(factors: tuple[float, ...]) -> Divisor:
    return Divisor(math.prod(factors) if factors else None, is_of_sum=True)


def _sums_one_number(node: Any) -> bool:
    """Whether it adds up one number, in a tensor that has dimensions."""
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    return node.name().startswith("SumBackward") and bool(sizes) and math.prod(sizes) == 1


def _is_penalty(node: Any) -> bool:
    """Whether a reduction is of parameters only, and not of what a model has computed."""
    stack = _children(node)
    while stack:
        each = stack.pop()
        if hasattr(each, "variable"):
            continue
        other = getattr(each, "_saved_other", None)
        has_data = None in next_nodes(each) and (other is None or other.dim() > 0)
        if has_data or not each.name().startswith((*_ELEMENTWISE, *_OF_PARAMETERS)):
            return False
        stack += _children(each)
    return True


def _reduces_stack(node: Any) -> bool:
    """Whether it adds up numbers that were stacked: the losses of several tasks, say."""
    level = _children(node)
    while level:
        for each in level:
            if each.name().startswith("Stack"):
                return any(_divisor_of(term, ()) is not None for term in _children(each))
        level = [
            child
            for each in level
            if each.name().startswith(_ELEMENTWISE)
            for child in _children(each)
        ]
    return False


def _summed_elements(node: Any) -> int:
    """How many numbers a reduction adds up."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return math.prod(node._saved_self_sym_sizes)
    if node.name() == "MeanBackward0":
        return int(node._saved_self_sym_numel)
    is_picked = node.name().startswith("NllLoss")  # one number of each row
    return int((node._saved_target if is_picked else node._saved_self).numel())


def _children(node: Any) -> list[Any]:
    return [each for each in next_nodes(node) if each is not None]


def _divisor_of(node: Any, factors: tuple[float, ...]) -> Divisor | None:
    """What this node divides by, if it is a reduction; `factors`: what its result is divided by.

    A mean of some of the rows, to which those of the others are added, has their number there.
    """
    if node.name() in ("SumBackward0", "SumBackward1"):
        is_whole = math.prod(node._saved_self_sym_sizes) > 1 and _reduces_rows(node)
        return _of_sum(factors) if is_whole else None
    if node.name() in ("MeanBackward0", "MeanBackward1"):
        count = float(node._saved_self_sym_numel)
        return Divisor(count * math.prod(factors)) if _reduces_rows(node) else None
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM:
        return _of_sum(factors)
    if reduction != _MEAN:
        return None
    weight = getattr(node, "_saved_total_weight", None)
    count = float(node._saved_self.numel() if weight is None else weight)
    return Divisor(count * math.prod(factors))


def _reduces_rows(node: Any) -> bool:
    """Whether a sum or mean makes one number of its rows, the first dimension."""
    if not hasattr(node, "_saved_dim"):
        return True
    sizes = node._saved_self_sym_sizes
    signed = (each - 2**64 if each >= 2**63 else each for each in node._saved_dim)
    reduced = {each % len(sizes) for each in signed} if sizes else set()
    kept = (size for dim, size in enumerate(sizes) if dim not in reduced)
    return 0 in reduced and math.prod(kept) == 1
