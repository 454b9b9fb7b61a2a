"""Opt-out of scripts that are distributed already: they run on every rank as they are.

The text of a script seldom shows whether it starts a process group of its own, because many do so
only under a launcher. So the launcher is hidden from the script. A script that then needs the
launcher, or calls a library for several processes, opts out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from instep.process.patching import Function, patches
from instep.unedited import launcher_env

OnOptOut = Callable[[str], None]

_on_opt_out: list[OnOptOut] = []


def set_handler(handler: OnOptOut | None) -> None:
    """Call `handler(reason)` if the script opts out; None: call nothing."""
    _on_opt_out[:] = [] if handler is None else [handler]


def _opt_out(reason: str) -> None:
    if _on_opt_out:
        _on_opt_out[0](reason)


def opts_out(reason: str) -> Function:
    """A replacement of a function that only distributed scripts call."""

    def answer(original: Function, *args: Any, **kwargs: Any) -> Any:
        _opt_out(reason)
        return original(*args, **kwargs)

    return answer


def environ_getitem(original: Function, self: Any, name: str) -> Any:
    """For os.environ[...]: a script that requires RANK was written for a launcher."""
    if name in launcher_env.masked:
        _opt_out(f"it takes {name} for granted")
    return original(self, name)


def environ_get(original: Function, self: Any, name: str, default: Any = None) -> Any:
    """For os.environ.get: a script that also runs without a launcher sees none."""
    return default if name in launcher_env.masked else original(self, name, default)


def environ_contains(original: Function, self: Any, name: object) -> Any:
    """For `in os.environ`."""
    return name not in launcher_env.masked and original(self, name)


def instep_getattr(original: Function, name: str) -> Any:
    """For `instep.replicate` and so on, if the script's text did not show it."""
    if name in sys.modules["instep"].__all__ and not _called_by_instep(2):
        _opt_out(f"it uses instep.{name}")
    return original(name)


def is_initialized(original: Function) -> Any:
    """For torch.distributed.is_initialized: the script has no process group."""
    return original() if _called_by_instep(2) else False


def rank_or_size(original: Function, group: Any = None) -> Any:
    """For torch.distributed.get_rank and get_world_size."""
    if not _called_by_instep(2):
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )
    return original(group)


def _called_by_instep(above: int) -> bool:
    """Whether the caller of a patched function is instep or torch.distributed itself."""
    frame: FrameType | None = sys._getframe(above + 1)
    while frame is not None and _module(frame).startswith("importlib."):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(("instep.", "torch.distributed."))


def _module(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


_LIGHTNING = opts_out("it uses Lightning")

OPT_OUT_PATCHES = (
    *patches(
        "the script sees one process",
        (type(os.environ), "get", environ_get),
        (type(os.environ), "__contains__", environ_contains),
        ("torch.distributed", "is_initialized", is_initialized),
        ("torch.distributed", "get_rank get_world_size", rank_or_size),
    ),
    *patches(
        "a script that is distributed already runs as it is",
        (type(os.environ), "__getitem__", environ_getitem),
        ("instep", "__getattr__", instep_getattr),
        (
            "torch.distributed",
            "init_process_group",
            opts_out("it starts a process group of its own"),
        ),
        (
            "torch.nn.parallel:DistributedDataParallel",
            "__init__",
            opts_out("it uses DistributedDataParallel"),
        ),
        ("horovod.torch", "init", opts_out("it uses Horovod")),
        ("apex.parallel:DistributedDataParallel", "__init__", opts_out("it uses Apex")),
        ("deepspeed", "initialize init_distributed", opts_out("it uses DeepSpeed")),
        ("accelerate.state:PartialState", "__init__", opts_out("it uses Accelerate")),
        ("lightning.fabric.fabric:Fabric", "__init__", _LIGHTNING),
        ("lightning.pytorch.trainer.trainer:Trainer", "__init__", _LIGHTNING),
        ("lightning_fabric.fabric:Fabric", "__init__", _LIGHTNING),
        ("pytorch_lightning.trainer.trainer:Trainer", "__init__", _LIGHTNING),
    ),
)
