"""A divided call under way: own rows in, aliases for the parameters, everyone's rows out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.rank_local import rank_local
from instep.distributed.communication.transport import Transport
from instep.process.patching import Function
from instep.training import forward_calls
from instep.training.blocks import Block
from instep.training.forward_calls import ForwardCall
from instep.training.pytree import Structure, Unchanged, flatten, is_value, unflatten, versions
from instep.unedited.errors import UndividedError
from instep.unedited.sharded_call.division import Division
from instep.unedited.sharded_call.grad_buckets import Cargo
from instep.unedited.sharded_call.grad_sums import aliases
from instep.unedited.sharded_call.mappings import own_rows, passed, share
from instep.unedited.sharded_call.random_numbers import WholeDraws
from instep.unedited.sharded_call.sharded_output import Rows


@dataclass(eq=False)
class Region:
    """What one divided call is made of."""

    block: Block
    division: Division
    way: Transport
    drawing: bool
    """Whether random numbers are drawn for the whole batch; slower by some microseconds for every
    operation."""
    inputs: list[Tensor] = field(default_factory=list)
    """What came in from the script and requires a gradient."""
    cargoes: list[Cargo] = field(default_factory=list)
    """What the gradients of its parameters travel in."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this call is under way: for its forward, and for what backward computes again."""
        global _current, _inside
        draws = WholeDraws(self.block, self.division.batch_dim, self.way) if self.drawing else None
        forward_calls.push(ForwardCall.of(self.block, statistics="global"))
        before, _current, _inside = _current, self, True
        try:
            with rank_local(), draws or nullcontext():
                yield
        finally:
            _current, _inside = before, before is not None
            forward_calls.pop()


_current: Region | None = None
_inside = False  # what torch.compile can put a guard on


def current() -> Region | None:
    """The divided call under way."""
    return _current


def is_inside() -> bool:
    """Whether a divided call is under way."""
    return _inside


def run(
    original: Function,
    module: nn.Module,
    leaves: Sequence[Any],
    structure: Structure,
    region: Region,
) -> tuple[list[Any], Structure]:
    """Call the module with this rank's rows; returns the flat outputs and their structure.

    Raises UndividedError where it changes its arguments, which the script would not see.
    """
    own = [_own(leaf, dim, region) for leaf, dim in zip(leaves, region.division.dims, strict=True)]
    if torch.is_grad_enabled():
        region.inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    args, kwargs = unflatten(own, structure)
    given = [Unchanged(x) for x in (*args, *kwargs.values()) if _can_change(x)]
    before = versions(leaves)
    with region.entered(), _represented(module, region):
        output = original(module, *args, **kwargs)
    if not all(given) or before != versions(leaves):
        raise UndividedError.changes_arguments(type(module).__name__)
    return flatten(output)


def _can_change(argument: Any) -> bool:
    """Whether this is a container or an object."""
    return not (isinstance(argument, Tensor) or is_value(argument))


def _own(leaf: Any, dim: int | None, region: Region) -> Any:
    if isinstance(leaf, Rows):
        if dim == 0 and leaf.whole is None and leaf.block == region.block:
            return passed(leaf.own)
        leaf = leaf.look()
    if dim is not None and not isinstance(leaf, Tensor):
        return leaf[region.block.start : region.block.stop]
    if dim is not None:
        return own_rows(leaf, region.block, dim, region.way)
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return share(leaf, 1, region.way)  # each rank's use of it is a part of its gradient
    return leaf


@contextmanager
def _represented(module: nn.Module, region: Region) -> Iterator[None]:
    """Inside, the module's parameters are represented by aliases (see `sums`)."""
    if not torch.is_grad_enabled():
        yield
        return
    parts = list(module.modules())
    slots = [
        (part._parameters, name, parameter)
        for part in parts
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    parameters = list({id(p): p for _, _, p in slots}.values())
    if not parameters:
        yield
        return
    made, region.cargoes = aliases(parameters, region.way)
    alias_of: dict[int, Any] = {id(p): alias for p, alias in zip(parameters, made, strict=True)}
    for table, name, parameter in slots:
        table[name] = alias_of[id(parameter)]
    recurrent = [part for part in parts if isinstance(part, nn.RNNBase)]
    _flatten(recurrent)
    try:
        yield
    finally:
        for table, name, parameter in slots:
            table[name] = parameter
        _flatten(recurrent)


_MARK = "instep.region"


def mark(outputs: Sequence[Any], region: Region) -> None:
    """Remember on the autograd graph itself that these outputs come from a divided call."""
    for output in outputs:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            notes: Any = output.grad_fn.metadata
            notes[_MARK] = region


def regions_below(roots: Iterable[Tensor]) -> list[Region]:
    """The divided calls that these tensors were computed from, the last ones first.

    Walks the graph outside of the calls: from the roots to marked outputs, and on from what had
    come into their calls.
    """
    found: dict[Region, None] = {}
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        region = node.metadata.get(_MARK)
        if region is None:
            below = [child for child, _ in node.next_functions]
        elif region in found:
            continue
        else:
            found[region] = None
            below = [x.grad_fn for x in region.inputs]
        for child in below:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return list(found)


def _flatten(recurrent: Sequence[nn.RNNBase]) -> None:
    """Recurrent layers keep a list of their weights."""
    for part in recurrent:
        part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]
