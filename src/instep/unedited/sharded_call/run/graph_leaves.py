"""The leaves of the autograd graph of a call's outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from instep.training.autograd_graph import next_nodes, walk
from instep.unedited.sharded_call.run.grad_sums import is_alias
from instep.unedited.sharded_call.run.mappings import is_region_input


def find_leaves(
    outputs: Iterable[Any], start: int, inputs: Iterable[Any] = ()
) -> list[Tensor] | None:
    """The tensors that these were computed from, without `inputs` and those of a sharded call;
    None if something is among them that was computed before `start`."""
    found: dict[int, Tensor] | None = {}
    ends = {x.grad_fn for x in inputs if isinstance(x, Tensor)}

    def visit(node: Any) -> Iterable[Any]:
        nonlocal found
        if is_alias(node) or is_region_input(node) or node in ends:
            return ()
        if found is not None and hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        elif node._sequence_nr() < start:
            found = None
        return () if found is None else next_nodes(node)

    walk((out for out in outputs if isinstance(out, Tensor)), visit)
    return None if found is None else list(found.values())
