"""PyTorch's private names for what sees its functions and operations: modes, scripts, profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.jit._builtins
import torch.overrides
import torch.utils._python_dispatch

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of tensor subclasses is not called."""
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""A mode that sees every operation."""


class OperationMode(TorchDispatchMode):
    """A TorchDispatchMode that does not import torch.compile at its first use (a second)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class KernelMode(OperationMode):
    """A mode that sees operations with kernels: compiled code runs as such in it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True."""
        return True


def dispatch_mode_stack() -> list[Any]:
    """The modes that see operations on this thread now."""
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The modes that intercept torch's functions now."""
profiler_enabled = torch.autograd._profiler_enabled
"""Whether torch.profiler records."""
script_operations: dict[int, str] = torch.jit._builtins._get_builtin_table()
"""The operations that torch.jit.script calls for functions of torch, by the ids of these."""
