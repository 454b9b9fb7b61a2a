"""Opt-out of scripts that are distributed already: they run on every rank as they are.

The text of a script seldom shows whether it starts a process group of its own, because many do so
only under a launcher. So the launcher is hidden from the script. A script that then needs the
launcher, or calls a library for several processes, opts out. A trainer of a library that can use
one process or several opts out only if the script asks it for several.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from instep.process import frames_from
from instep.process.patching import Function, patches
from instep.process.process_value import ProcessValue
from instep.unedited import launcher_env


class BatchEffect(StrEnum):
    """A sentence on the batch of a script that each of `n` ranks runs as it is."""

    UNKNOWN = (
        "If each rank takes batches of one process's size from a part of the data, the batch is "
        "{n} times larger, with 1/{n} of the steps; if each takes all data, these are {n} "
        "identical runs."
    )
    PER_RANK = "Its batch is then {n} times larger, with 1/{n} of the steps."
    IDENTICAL = "These are {n} identical runs."
    UNSHARDED = (
        "It does not call instep.shard: if it does not divide its data otherwise, each of the {n} "
        "ranks computes all of it."
    )
    SAME = ""
    """The script divides the batch that it names."""
    SHARDED = "each rank runs it as written, and instep.shard divides the batches."
    """So does one that calls instep.shard: the whole line."""


OnOptOut = Callable[[str, BatchEffect], None]

_on_opt_out = ProcessValue[OnOptOut | None](None)


def set_handler(handler: OnOptOut | None) -> None:
    """Call `handler(reason, effect)` if the script opts out; None: call nothing."""
    _on_opt_out.value = handler


def _opt_out(reason: str, effect: BatchEffect = BatchEffect.UNKNOWN) -> None:
    if _on_opt_out.value is not None:
        _on_opt_out.value(reason, effect)


def opts_out(reason: str) -> Function:
    """A replacement of a function that only distributed scripts call."""

    def answer(original: Function, *args: Any, **kwargs: Any) -> Any:
        _opt_out(reason)
        return original(*args, **kwargs)

    return answer


def environ_getitem(original: Function, self: Any, key: str) -> Any:
    """For os.environ[...]: a script that requires RANK was written for a launcher."""
    if launcher_env.is_masked(key):
        _opt_out(f"it takes {key} for granted")
    return original(self, key)


def environ_get(original: Function, self: Any, key: str, default: Any = None) -> Any:
    """For os.environ.get: a script that also runs without a launcher sees none."""
    return default if launcher_env.is_masked(key) else original(self, key, default)


def environ_contains(original: Function, self: Any, key: object) -> Any:
    """For `in os.environ`."""
    return not launcher_env.is_masked(key) and original(self, key)


def instep_getattr(original: Function, name: str) -> Any:
    """For `instep.replicate` and so on, if the script's text did not show it."""
    if name in sys.modules["instep"].__all__ and not _called_by_instep():
        _opt_out(f"it uses instep.{name}", BatchEffect.SAME)
    return original(name)


def is_initialized(original: Function) -> Any:
    """For torch.distributed.is_initialized: the script has no process group."""
    return original() if _called_by_instep() else False


def rank_or_size(original: Function, group: Any = None) -> Any:
    """For torch.distributed.get_rank and get_world_size."""
    if not _called_by_instep():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )
    return original(group)


def _called_by_instep() -> bool:
    """Whether the caller of the patched function whose replacement asks this is instep or
    torch.distributed itself.

    Not torch.distributed.checkpoint: it saves for the script, as in one process.
    """
    for frame in frames_from(sys._getframe(3)):
        module = f"{frame.f_globals.get('__name__', '')}."
        if not module.startswith("importlib."):
            is_own = module.startswith(("instep.", "torch.distributed."))
            return is_own and not module.startswith("torch.distributed.checkpoint.")
    return False


def init_process_group(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For torch.distributed.init_process_group."""
    bound = _arguments(original, args, kwargs)
    if bound.get("world_size") == 1:
        _opt_out("it starts a process group of one process", BatchEffect.IDENTICAL)
    else:
        _opt_out("it starts a process group of its own")
    return original(*args, **kwargs)


# ------------------------------------------------------------------------ trainers of libraries


def parallel_init(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For the __init__ of Lightning's Trainer and Fabric."""
    asked = several_devices(_arguments(original, args, kwargs))
    if asked is not None:
        _opt_out(f"it asks Lightning for {asked}", BatchEffect.PER_RANK)
    return original(*args, **kwargs)


def several_devices(arguments: Mapping[str, Any]) -> str | None:
    """By which of these arguments of Lightning's a script asks for several processes (pure)."""
    for name in ("devices", "gpus", "num_processes", "num_nodes"):
        if _count(arguments.get(name)) > 1:
            return f"{name}={arguments[name]!r}"
    strategy = arguments.get("strategy")
    if isinstance(strategy, str):
        if strategy.lower() != "auto" and not strategy.lower().startswith("single"):
            return f"strategy={strategy!r}"
    elif any(base.__name__ == "ParallelStrategy" for base in type(strategy).__mro__):
        return f"strategy={type(strategy).__name__}()"
    return None


def _count(devices: Any) -> int:
    """A number of devices, as Lightning reads it; "auto" and -1 are all that a rank has: one."""
    if isinstance(devices, str):
        names = [name for name in devices.split(",") if name.strip()]
        if len(names) != 1 or "," in devices:
            return len(names)
        return int(devices) if devices.strip().isdigit() else 1
    if isinstance(devices, Sequence):
        return len(devices)
    return devices if isinstance(devices, int) else 1


_SHARDED_BY = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "a parallelism_config",
}
"""Arguments of Accelerate's Accelerator that only make sense for several processes."""
_ACCELERATE_FLAGS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""Variables by which `accelerate launch` asks for the same."""


def accelerator(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For the __init__ of Accelerate's Accelerator."""
    arguments = _arguments(original, args, kwargs)
    for name, what in _SHARDED_BY.items():
        if arguments.get(name) is not None:
            _opt_out(f"it asks Accelerate for {what}", BatchEffect.PER_RANK)
    return original(*args, **kwargs)


def partial_state(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For the __init__ of Accelerate's PartialState, which finds out how many processes there are.

    Hugging Face's Trainer sets such a variable while it makes one.
    """
    for name, what in _ACCELERATE_FLAGS.items():
        if os.environ.get(name, "").lower() in ("true", "1"):
            _opt_out(f"it asks Accelerate for {what}", BatchEffect.PER_RANK)
    return original(*args, **kwargs)


def training_arguments(original: Function, self: Any) -> Any:
    """For the __post_init__ of transformers' TrainingArguments."""
    for name in ("deepspeed", "fsdp"):
        if getattr(self, name, None):
            _opt_out(f"it asks the Trainer for {name}", BatchEffect.PER_RANK)
    return original(self)


def _arguments(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of this call by their names."""
    positional = inspect.signature(function).parameters
    return dict(zip(positional, args, strict=False)) | kwargs


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
        ("torch.distributed", "init_process_group", init_process_group),
        (
            "torch.nn.parallel:DistributedDataParallel",
            "__init__",
            opts_out("it uses DistributedDataParallel"),
        ),
        ("horovod.torch", "init", opts_out("it uses Horovod")),
        ("apex.parallel:DistributedDataParallel", "__init__", opts_out("it uses Apex")),
        ("deepspeed", "initialize init_distributed", opts_out("it uses DeepSpeed")),
    ),
    *patches(
        "a trainer that is asked for several processes runs as it is, and one process is divided",
        ("accelerate.accelerator:Accelerator", "__init__", accelerator),
        ("accelerate.state:PartialState", "__init__", partial_state),
        ("transformers.training_args:TrainingArguments", "__post_init__", training_arguments),
        ("lightning.fabric.fabric:Fabric", "__init__", parallel_init),
        ("lightning.pytorch.trainer.trainer:Trainer", "__init__", parallel_init),
        ("lightning_fabric.fabric:Fabric", "__init__", parallel_init),
        ("pytorch_lightning.trainer.trainer:Trainer", "__init__", parallel_init),
    ),
)
