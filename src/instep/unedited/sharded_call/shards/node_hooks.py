"""Hooks of the script's on the nodes that put gradients into `.grad` (AccumulateGrad), which it
finds as `p.expand_as(p).grad_fn.next_functions[0][0]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from instep.process.patching import Function, replaced
from instep.process.process_value import ProcessValue
from instep.process.torch_private.autograd import HOOKED_NODE

Hooks = dict[int, Any]
"""The hooks of one kind of a node, by their numbers."""

_are_any = ProcessValue(False)
"""Whether the script has ever registered a hook on a node, of any kind."""


def note_hook(original: Function, hooks: Hooks | None, hook: Any) -> Any:
    """What C++ calls where a node gets a hook; `hooks` are those that it has."""
    if not str(getattr(hook, "__module__", "")).startswith("instep."):
        _are_any.value = True
    return original(hooks, hook)


def node_hooks_of(parameter: Tensor) -> list[Hooks]:
    """The hooks on the node that puts this parameter's gradient into `.grad`, of each kind of which
    there are some."""
    if not (_are_any.value and parameter.is_leaf and parameter.requires_grad):
        return []
    found: list[Hooks] = []

    def note(hooks: Hooks | None, _: Any) -> tuple[Hooks, None]:
        known = {} if hooks is None else hooks
        found.append(known)
        return known, None

    node: Any = get_gradient_edge(parameter).node
    with replaced((*HOOKED_NODE, staticmethod(note))):  # only C++ knows them, and gives them to it
        node.register_hook(None)
        node.register_prehook(None)
    return [hooks for hooks in found if hooks]


def have_node_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether there are such hooks of any of these parameters."""
    return _are_any.value and any(map(node_hooks_of, parameters))
