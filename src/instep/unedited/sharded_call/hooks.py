"""Hooks of the script's on a module's parts: they must see whole batches."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooked(module: nn.Module) -> str:
    """Which part of it the script has a hook on, in words; nothing if none."""
    if any(_has_users(getattr(everywhere, f"_global{kind}")) for kind in _KINDS):
        return "the script has a hook on all modules, which must see whole batches"
    for part in module.modules():
        state = part.__dict__
        if any(state[kind] and _has_users(state[kind]) for kind in _KINDS):
            return (
                f"the script has a hook on its {type(part).__name__}, which must see whole batches"
            )
    return ""


def _has_users(hooks: dict[int, Any]) -> bool:
    """Whether any is not torch's own (normed weights have some) or ours."""
    for hook in hooks.values():
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.split(".")[0] not in ("torch", "instep"):
            return True
    return False
