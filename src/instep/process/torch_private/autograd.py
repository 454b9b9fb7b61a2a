"""PyTorch's private names of autograd, of its graph, and of the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

hooks_of = attrgetter("_backward_hooks")
"""A tensor's hooks on its gradient."""
later_hooks_of = attrgetter("_post_accumulate_grad_hooks")
"""A parameter's hooks for when its gradient is in `.grad`."""
HOOKED_NODE = torch.autograd.Function, "_register_hook"
"""The class, and the name of its static method, that C++ calls where a node of any kind gets a hook
(`register_hook`, `register_prehook`)."""
current_graph_task_id = torch._C._current_graph_task_id
"""Which backward is running in this thread; -1: none."""
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""At which node that backward is; None: at none, as in a callback at its end."""
run_backward = torch.autograd.graph._engine_run_backward
"""What torch.autograd.grad runs: it imports sympy to compare shapes, which takes 0.3 s."""
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""The top of the stack of torch.func's transforms; None: none is active."""
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a transform of torch.func has wrapped this tensor."""
interpreter_stack = torch._C._functorch.get_interpreter_stack
"""The transforms that are active now; None: none is."""
VMAP = torch._C._functorch.TransformType.Vmap
"""The key of torch.vmap among these."""
unwrap_transformed = torch._C._functorch.get_unwrapped
"""What this transform has wrapped."""


def is_in_forward_ad() -> bool:
    """Whether a level of torch.autograd.forward_ad is active, as in torch.func.linearize."""
    return torch.autograd.forward_ad._current_level >= 0


saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks
)
"""The innermost hooks that pack and unpack what autograd saves; None: there are none."""
_RAW_SAVED = "_raw_saved_"
"""Begins the names of what a node of the autograd graph has saved, as its hooks have packed it."""
_raw_saved_names: dict[type, list[str]] = {}


def saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that a node of the autograd graph has saved, without those that hooks pack."""
    kind = type(node)
    if kind not in _raw_saved_names:
        _raw_saved_names[kind] = [name for name in dir(node) if name.startswith(_RAW_SAVED)]
    found = []
    for name in _raw_saved_names[kind]:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # the graph was freed
            continue
        for each in saved if isinstance(saved, tuple | list) else (saved,):
            if getattr(each, "unpack_hook", None) is None:
                value = getattr(each, "data", None)
                found += [value] if isinstance(value, torch.Tensor) else []
    return found


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulates_in(node: Any) -> bool:
    """Whether the running backward accumulates into the leaf of this node; False also where
    torch.autograd.grad gives the leaf's gradient to its caller."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which is what it says in torch.autograd.grad
        return False
