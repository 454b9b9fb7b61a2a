"""Casts: of a model's parameters, of its inputs and outputs, or in torch's functions (autocast)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from instep.process.patching import Function, Patch, PatchHandle
from instep.process.torch_private.modules import BatchNorm
from instep.process.torch_private.tensors import tree_map

# ---------------------------------------------------------------------------------- a model


def cast_model(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> None:
    """Cast parameters and floating-point buffers in place; the Parameter objects stay."""
    for module in model.modules():
        if not (keep_batchnorm and isinstance(module, BatchNorm)):
            module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def cast_inputs_and_outputs(
    model: nn.Module, inside: torch.dtype | None, outside: torch.dtype
) -> None:
    """Cast a model's floating-point inputs to `inside`, and such outputs to `outside`."""
    if inside is not None:
        model.register_forward_pre_hook(_CastInputs(inside), with_kwargs=True)
    model.register_forward_hook(_CastOutputs(outside))


@dataclass(frozen=True)
class _CastInputs:
    """A forward pre-hook that can be pickled with its model."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast(args, self.dtype), cast(kwargs, self.dtype)


@dataclass(frozen=True)
class _CastOutputs:
    """A forward hook that can be pickled with its model."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        return cast(output, self.dtype)


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Nested values with every floating-point tensor in `dtype`.

    A batch of a class of its own is cast by its own `to`.
    """

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        own = hasattr(value, "to") and not isinstance(value, nn.Module | type)
        return value.to(dtype) if own else value

    return tree_map(one, values)


# ------------------------------------------------------------------------- torch's functions

_devices: list[str] = []
"""The types of device whose functions are cast."""


def cast_functions(dtype: torch.dtype, device_types: Iterable[str]) -> None:
    """Let torch's functions choose their dtype (autocast) in this thread, until `stop_casting`.

    Losses and whatever else is computed outside of the model are cast too. Weights are cast at each
    use: a cache would outlive the optimizer's step. Backward computes in the dtypes that forward
    chose.
    """
    stop_casting()
    _devices[:] = device_types
    torch.set_autocast_cache_enabled(False)
    for device_type in _devices:
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, True)
    names = ("backward", "grad")
    PatchHandle(Patch(torch.autograd, name, _without_cast, compile="skip") for name in names)


def stop_casting() -> None:
    """End `cast_functions`."""
    for device_type in _devices:
        torch.set_autocast_enabled(device_type, False)
    if _devices:
        torch.set_autocast_cache_enabled(True)
    _devices.clear()


def active_dtype() -> torch.dtype | None:
    """The half-precision dtype to which functions are cast at this point, or None."""
    for device_type in _devices:
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    return None


@contextmanager
def no_cast() -> Iterator[None]:
    """Inside, functions compute in the dtype of their inputs."""
    with ExitStack() as stack:
        for device_type in _devices:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _without_cast(original: Function, *args: Any, **kwargs: Any) -> Any:
    with no_cast():
        return original(*args, **kwargs)
