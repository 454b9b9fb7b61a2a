"""Apex's tests of amp without a GPU: the stand-in says of CPU tensors that they are on one.

It is the same on instep and beside it on Apex. On instep half precision is float16, as on a GPU,
and not the bfloat16 of CPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from instep.process.import_hooks import after_import


def on_a_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for which "cuda" is a CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(each, str) and each == "cuda" else each for each in args)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return wrapper


def stand_in_for_extensions() -> None:
    """What tests of LAMB compute their reference by: norms of lists of tensors."""
    applier: Any = ModuleType("apex.multi_tensor_apply")
    applier.multi_tensor_applier = l2norm = MultiTensorNorm()
    extension: Any = ModuleType("amp_C")
    extension.multi_tensor_l2norm = extension.multi_tensor_lamb = l2norm
    sys.modules.update({"apex.multi_tensor_apply": applier, "amp_C": extension})


class MultiTensorNorm:
    """Apex's `multi_tensor_applier(amp_C.multi_tensor_l2norm, …)`."""

    available = True

    def __call__(self, _: Any, __: Any, lists: list[list[torch.Tensor]], *___: Any) -> Any:
        """The norm of all tensors of the first list."""
        norms = [tensor.double().square().sum() for tensor in lists[0]]
        return torch.stack(norms).sum().sqrt().float().view(1), None


def make_tests_for_cpus(module: Any) -> None:
    """Let PyTorch's maker of tests make those for CPUs where a file asks for those for GPUs."""
    make = module.instantiate_device_type_tests

    def make_for_cpus(test: type, scope: dict[str, Any], **_: Any) -> None:
        make(test, scope, only_for=("cpu",))

    module.instantiate_device_type_tests = make_for_cpus


def install() -> None:
    """Change PyTorch's classes, for this whole process."""
    tensor: Any = torch.Tensor
    kind, move = torch.Tensor.type, torch.Tensor.cpu

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def type_on_a_gpu(self: torch.Tensor, to: Any = None, *more: Any, **named: Any) -> Any:
        if to is None:
            is_moved = hasattr(self, "is_moved")
            return kind(self) if is_moved else kind(self).replace("torch.", "torch.cuda.")
        if isinstance(to, str):
            to = to.replace("torch.cuda.", "torch.")
        return kind(self, to, *more, **named)

    def moved_to_a_cpu(self: torch.Tensor) -> Any:
        there: Any = move(self).view_as(self)  # the tensor itself stays "on a GPU"
        there.is_moved = True
        return there

    def module_on_a_cpu(self: torch.nn.Module) -> torch.nn.Module:
        self.register_forward_hook(lambda _, __, output: moved_to_a_cpu(output))
        return self

    tensor.type = type_on_a_gpu
    tensor.cpu = moved_to_a_cpu
    torch.nn.Module.cpu = module_on_a_cpu  # type: ignore[assignment, method-assign]
    tensor.is_cuda = property(lambda self: not hasattr(self, "is_moved"))
    tensor.cuda = torch.nn.Module.cuda = same
    for name in ("FloatTensor", "HalfTensor", "IntTensor", "LongTensor", "DoubleTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    for owner, names in (
        (torch, "arange empty full ones rand randn tensor zeros"),
        (torch.nn.Module, "to"),
        (torch.Tensor, "to"),
    ):
        for name in names.split():
            setattr(owner, name, on_a_cpu(getattr(owner, name)))
    if os.environ["SUITE_COMPAT"]:
        from instep.compat.apex.amp import amp, frontend

        setattr(amp, "default_half", lambda _: torch.float16)  # noqa: B010
        setattr(frontend, "default_half", lambda _: torch.float16)  # noqa: B010
        stand_in_for_extensions()
    after_import("torch.testing._internal.common_device_type", make_tests_for_cpus)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_bf16_supported = lambda *_: True
    torch.amp.GradScaler = functools.partial(on_a_cpu(torch.amp.GradScaler))  # type: ignore[misc]
    torch.amp.autocast = on_a_cpu(torch.amp.autocast)  # type: ignore[misc, assignment]
    torch.cuda.current_device = lambda: 0
