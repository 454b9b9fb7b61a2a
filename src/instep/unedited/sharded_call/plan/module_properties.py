"""Properties of a module that bear on its calls: hooks of the script's, and torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def find_user_hook(module: nn.Module) -> str:
    """Say which part of the module the script has a hook on; "" if none.

    Such hooks must see whole batches.
    """
    if any(_has_user_hook(getattr(global_hooks, f"_global{name}")) for name in _HOOKS):
        return "the script has a hook on all modules, which must see whole batches"
    for part in module.modules():
        state = part.__dict__
        if any(state[name] and _has_user_hook(state[name]) for name in _HOOKS):
            return (
                f"the script has a hook on its {type(part).__name__}, which must see whole batches"
            )
    return ""


def _has_user_hook(hooks: dict[int, Any]) -> bool:
    """Whether any is not torch's own (normed weights have some) or instep's."""
    for hook in hooks.values():
        module = getattr(hook, "__module__", None) or type(hook).__module__
        if module.split(".")[0] not in ("torch", "instep"):
            return True
    return False


def is_compiled(parts: Iterable[nn.Module]) -> bool:
    """Whether any of these is compiled."""
    return any(hasattr(part, "dynamo_ctx") or part._compiled_call_impl for part in parts)


def allow_repeated_backward() -> None:
    """Let torch.compile make backward functions that can be called more than once."""
    from torch._functorch import config  # heavy; there by now, as something is compiled

    config.donated_buffer = False


@contextmanager
def ignore_grad_warnings(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, torch.compile may look at the `.grad` of tensors that are no leaves, which warns.

    These are the aliases of parameters, and what one graph leaves to the next one.
    """
    if not is_compiled(parts):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        yield
