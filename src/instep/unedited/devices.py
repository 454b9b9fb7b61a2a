"""Scripts that name several devices of a host: each rank has one device, its own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.distributed.identity import torch_devices
from instep.process.patching import Function, patches


def use_own_device(*names: str) -> Function:
    """A replacement of a function whose arguments of these names are devices."""

    def answer(original: Function, *args: Any, **kwargs: Any) -> Any:
        kind = torch_devices.accelerator_type()
        if kind is None:
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs)
        for name in names:
            if name in bound.arguments:
                bound.arguments[name] = replace_devices(bound.arguments[name], kind)
        return original(*bound.args, **bound.kwargs)

    return answer


def replace_devices(named: Any, kind: str) -> Any:
    """This rank's device in place of those that a script names; the CPU stays the CPU (pure).

    Args:
        named: a device in any of torch's spellings, a list of devices, or None.
        kind: the type of this rank's device, such as "cuda".
    """
    if isinstance(named, Sequence) and not isinstance(named, str):
        return [replace_devices(device, kind) for device in named[:1]]
    if isinstance(named, int):
        return min(named, 0)  # -1 is the CPU
    if isinstance(named, str | torch.device) and torch.device(named).type == kind:
        return torch.device(kind, 0)
    return named


DEVICE_PATCHES = patches(
    "a rank has one device, its own",
    (nn.DataParallel, "__init__", use_own_device("device_ids", "output_device")),
    (nn.parallel, "data_parallel", use_own_device("device_ids", "output_device")),
    (nn.parallel, "replicate parallel_apply", use_own_device("devices")),
    (nn.parallel, "scatter", use_own_device("target_gpus")),
    (nn.parallel, "gather", use_own_device("target_device")),
)
