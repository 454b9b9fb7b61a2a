"""The autograd graph: a walk over its nodes, and tags on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from instep.process.torch_private.autograd import saved_by

Root = Tensor | GradientEdge
"""Where a backward begins."""


def tag(tensors: Iterable[Tensor], name: str, value: object) -> None:
    """Write `value` on the nodes that have computed these tensors."""
    for tensor in tensors:
        if tensor.grad_fn is not None:
            node: Any = tensor.grad_fn  # torch's stub calls its property `metadata` a method
            node.metadata[name] = value


def roots_of(tensors: Any) -> tuple[Root, ...]:
    """Where a backward begins, by the first argument of torch.autograd.backward."""
    return (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)


def node_of(root: Root) -> Any:
    """The node that has computed it; None if none has."""
    return root.grad_fn if isinstance(root, Tensor) else root.node


def walk(roots: Iterable[Root], visit: Callable[[Any], Iterable[Any]]) -> None:
    """Visit the nodes from which these tensors were computed, each once, the last ones first.

    `visit(node)` returns the nodes with which to go on: `next_nodes(node)`, or others, or none.
    """
    stack = [node for root in roots if (node := node_of(root)) is not None]
    seen = set(stack)
    while stack:
        for node in visit(stack.pop()):
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)


def next_nodes(node: Any) -> list[Any]:
    """The nodes to which a node hands its gradients in backward."""
    return [child for child, _ in node.next_functions]


def saved_tensors(roots: Iterable[Root]) -> list[Tensor]:
    """The tensors that the graph of these has saved for backward, without those that hooks must
    fetch, as of gradient checkpointing."""
    found: list[Tensor] = []

    def visit(node: Any) -> list[Any]:
        found.extend(saved_by(node))
        return next_nodes(node)

    walk(roots, visit)
    return found


def used_by_others(values: Sequence[Any]) -> list[bool]:
    """From which of these values, if they are tensors, others among them were computed."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if sum(tensor.requires_grad for tensor in tensors) < 2:
        return [False] * len(values)
    edges: Counter[tuple[Any, int]] = Counter(
        (tensor.grad_fn, tensor.output_nr) for tensor in tensors
    )

    def visit(node: Any) -> list[Any]:
        edges.update(node.next_functions)
        return next_nodes(node)

    walk(tensors, visit)
    return [
        isinstance(value, Tensor)
        and value.grad_fn is not None
        and edges[value.grad_fn, value.output_nr] > 1
        for value in values
    ]
