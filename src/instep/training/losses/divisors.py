"""What a loss divides by, read from its graph: a warning where that is not the rank's rows.

A rank's loss has the weight of its rows, unless `instep.weight` states what it divides by instead:
the sum of class weights, the tokens that are kept, or nothing. PyTorch's nodes have these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.distributed.numbers import gather_values
from instep.distributed.watchdog.call_stack import script_line
from instep.training.autograd_graph import Root, next_nodes, node_of
from instep.training.blocks import Block
from instep.training.forward_calls import depends_on_call

_LINEAR = ("Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Unsqueeze", "Clone")
_ELEMENTWISE = ("Mul", "Div", "Exp", "Log", "Pow", "Sqrt", *_LINEAR)
_SUM, _MEAN = 2, 1
"""What torch's losses save as their reduction."""
_NONE = -1.0
_warned: set[tuple[str, str]] = set()
_met_uneven: WeakSet[object] = WeakSet()


def is_first_uneven(replica: object, block: Block) -> bool:
    """Whether this is the replica's first batch of which the ranks have different numbers of rows.

    There a sum that is divided by a constant shows; elsewhere it looks like a mean over columns.
    """
    if replica in _met_uneven or block.total < block.size or block.total % block.size == 0:
        return False
    _met_uneven.add(replica)
    return True


def check_divisors(roots: Iterable[Root], rows: int, total: int, transport: Transport) -> None:
    """Warn, once for each line, of a loss that is no mean over rows.

    Args:
        roots: on which backward is called.
        rows: this rank's.
        total: those of all ranks. A sum of other than so many elements that is divided by so much
            is one over rows that is divided by the batch size.

    Collective.
    """
    whole = None if rows == total else float(total)
    found = [each for root in roots for each in _divisors(node_of(root), whole)] if rows else []
    ratios = [divisor / rows for divisor in found if divisor is not None]
    mine = [None in found, min(ratios, default=_NONE), max(ratios, default=_NONE)]
    sums, *bounds = zip(*gather_values(mine, transport), strict=True)
    if any(sums):
        _warn("is a sum over rows", "instep.weight(None)")
    elif any(_differ([each for each in bound if each != _NONE]) for bound in bounds):
        _warn(
            "does not divide by its rows (the ranks' divisors are not in proportion to their rows)",
            "instep.weight((y != ignore_index).sum()), for example; instep.weight(None), if it is "
            "a sum, also one that is divided by a constant",
        )


def are_sums(roots: Iterable[Root]) -> bool:
    """Whether these are sums, of which no term is a mean."""
    found = [
        each for root in roots for each in _divisors(node_of(root), None, lambda reduction: True)
    ]
    return bool(found) and all(divisor is None for divisor in found)


def _differ(numbers: list[float]) -> bool:
    return any(not math.isclose(each, numbers[0], rel_tol=1e-5) for each in numbers)


def _warn(what: str, call: str) -> None:
    line = script_line()
    if (line, what) not in _warned:
        _warned.add((line, what))
        warn_at_script_line(
            f"This line calls backward on a loss that {what}: the gradient is not that of one "
            f"process. State what it divides by, before backward: {call}. [INS716]"
        )


def _divisors(
    root: Any, total: float | None, counts: Callable[[Any], bool] = depends_on_call
) -> Iterator[float | None]:
    """What the terms of a loss divide by whose reduction `counts`, by default those that come from
    a replica; None for a sum, also one that is divided by `total`."""
    stack: list[tuple[Any, float | None]] = [(root, None)]
    seen = set()
    while stack:
        node, divisor = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found, is_reduction = _divisor_of(node, divisor)
        if is_reduction:
            if counts(node) and not _reduces_stack(node):
                is_sum = found == total is not None and _summed_elements(node) != total
                yield None if is_sum else found
        elif node.name().startswith(("Mul", "Div")):
            other = node._saved_other
            if isinstance(other, Tensor) and other.numel() == 1 and other:
                factor = other.item() if node.name().startswith("Div") else 1 / other.item()
                stack.append((next_nodes(node)[0], factor * (divisor or 1.0)))
        elif node.name().startswith(_LINEAR):
            stack += [(child, divisor) for child in next_nodes(node)]


def _reduces_stack(node: Any) -> bool:
    """Whether it adds up numbers that were stacked: the losses of several tasks, say."""
    level = _children(node)
    while level:
        for each in level:
            if each.name().startswith("Stack"):
                return any(_divisor_of(term, None)[1] for term in _children(each))
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


def _divisor_of(node: Any, divisor: float | None) -> tuple[float | None, bool]:
    """What this node divides by, if it is a reduction; `divisor`: what its sum is divided by."""
    if hasattr(node, "_saved_self_sym_sizes") and node.name() == "SumBackward0":
        return divisor, math.prod(node._saved_self_sym_sizes) > 1
    if node.name() == "MeanBackward0":
        return float(node._saved_self_sym_numel), True
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM:
        return divisor, True
    if reduction != _MEAN:
        return None, False
    total = getattr(node, "_saved_total_weight", None)
    return float(node._saved_self.numel() if total is None else total), True
