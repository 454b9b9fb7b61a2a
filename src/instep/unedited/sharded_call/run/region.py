"""The region of a sharded call: the part of a forward in which each rank has its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from instep.distributed.communication.rank_local import rank_local
from instep.distributed.communication.transport import Transport
from instep.training import forward_calls
from instep.training.blocks import Block
from instep.training.forward_calls import ForwardCall
from instep.unedited.sharded_call.plan.division import Division
from instep.unedited.sharded_call.run.grad_buckets import Cargo
from instep.unedited.sharded_call.run.random_numbers import GlobalBatchRandomMode


@dataclass(eq=False)
class Region:
    """One sharded call, from its forward until its backward."""

    block: Block
    division: Division
    transport: Transport
    is_random: bool
    """Whether random numbers are drawn for the whole batch; slower by some microseconds for every
    operation."""
    inputs: list[Tensor] = field(default_factory=list)
    """The arguments from the script that require a gradient."""
    buckets: list[Cargo] = field(default_factory=list)
    """The buckets of its parameters' gradients."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this call is under way: for its forward, and for what backward recomputes."""
        global _current, _inside
        mode = None
        if self.is_random:
            mode = GlobalBatchRandomMode(self.block, self.division.batch_dim, self.transport)
        forward_calls.push(ForwardCall.of(self.block, statistics="global"))
        before, _current, _inside = _current, self, True
        try:
            with rank_local(), mode or nullcontext():
                yield
        finally:
            _current, _inside = before, before is not None
            forward_calls.pop()


_current: Region | None = None
_inside = False  # what torch.compile can put a guard on


def current_region() -> Region | None:
    """The sharded call under way."""
    return _current


def is_inside() -> bool:
    """Whether a sharded call is under way."""
    return _inside


_TAG = "instep.region"


def tag_outputs(outputs: Sequence[Any], region: Region) -> None:
    """Write down in the autograd graph that these outputs come from this sharded call."""
    for output in outputs:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            metadata: Any = output.grad_fn.metadata
            metadata[_TAG] = region


def find_regions(roots: Iterable[Tensor]) -> list[Region]:
    """The sharded calls that these tensors were computed from, the last ones first.

    Walks the graph outside of the calls: from the roots to tagged outputs, and on from the inputs
    of their calls.
    """
    found: dict[Region, None] = {}
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        region = node.metadata.get(_TAG)
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
