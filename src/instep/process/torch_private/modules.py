"""PyTorch's private names of modules: their base classes, and what they compute with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.modules.batchnorm
import torch.nn.utils.parametrize


def has_script_buffers(value: Any) -> bool:
    """Whether this is a scripted module without its Python object, as torch.fx leaves one, and has
    buffers itself or in its parts."""
    if not isinstance(value, torch._C.ScriptModule):
        return False
    if len(torch._C.BufferDict(value).items()):  # type: ignore[attr-defined]
        return True
    return any(has_script_buffers(part) for _, part in torch._C.ModuleDict(value).items())


VF = torch._VF
"""The functions by which nn.RNN and its relatives compute."""


def is_caching_weights() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is on, which keeps what parametrizations
    compute."""
    return torch.nn.utils.parametrize._cache_enabled > 0


BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""The base of all batch normalisations."""
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
"""Likewise."""
Dropout = torch.nn.modules.dropout._DropoutNd
"""The base of all modules that drop units, with the probability `p`."""


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that a loss means by two arguments of old."""
    meant: str = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    return meant
