"""The leaves of the autograd graph of a call's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.training.autograd_graph import next_nodes, walk
from instep.unedited.sharded_call.run.grad_sums import is_alias
from instep.unedited.sharded_call.run.mappings import is_region_input


def next_sequence_number() -> int:
    """The number of the node that autograd makes next."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).clone().grad_fn
    number: int = node._sequence_nr()
    return number


def find_leaves(outputs: Sequence[Any], start: int) -> list[Tensor] | None:
    """The tensors that these were computed from, without inputs of a sharded call; None if
    something is among them that was computed before `start`."""
    found: dict[int, Tensor] | None = {}

    def visit(node: Any) -> Iterable[Any]:
        nonlocal found
        if is_alias(node) or is_region_input(node):
            return ()
        if found is not None and hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        elif node._sequence_nr() < start:
            found = None
        return () if found is None else next_nodes(node)

    walk((out for out in outputs if isinstance(out, Tensor)), visit)
    return None if found is None else list(found.values())
