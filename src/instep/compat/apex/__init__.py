"""NVIDIA Apex: `amp`, `parallel` and `fp16_utils`, which it removed in 2025, `optimizers` and
`normalization`.

    from instep.compat.apex import amp
    from instep.compat.apex.parallel import DistributedDataParallel

Under `instep run`, and where no Apex is installed, `from apex import amp` is the same.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep.compat.apex import amp, fp16_utils, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "normalization", "optimizers", "parallel"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
