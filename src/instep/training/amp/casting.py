"""In which dtype a model computes: its parameters, its inputs and outputs, or torch's functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from instep.process.patching import Function, Patch, PatchHandle

# ---------------------------------------------------------------------------------- a model


def cast_model(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> None:
    """Cast parameters and floating-point buffers in place; the Parameter objects stay."""
    for module in model.modules():
        if not (keep_batchnorm and isinstance(module, _BatchNorm)):
            module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def cast_inputs_and_outputs(
    model: nn.Module, inside: torch.dtype | None, outside: torch.dtype
) -> None:
    """Cast what floats among a model's inputs to `inside`, and among its outputs to `outside`."""
    if inside is not None:
        model.register_forward_pre_hook(_Entrance(inside), with_kwargs=True)
    model.register_forward_hook(_Exit(outside))


@dataclass(frozen=True)
class _Entrance:
    """A forward pre-hook that can be pickled with its model."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast(args, self.dtype), cast(kwargs, self.dtype)


@dataclass(frozen=True)
class _Exit:
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

_devices: tuple[str, ...] = ()
"""Kinds of device whose functions are cast; none where nobody asked for it."""


def cast_functions(dtype: torch.dtype, kinds: Iterable[str]) -> None:
    """Let torch's functions choose their dtype by themselves from now on, in this thread.

    That is PyTorch's autocast without an end: losses and whatever else is computed outside of the
    model are cast too. Weights are cast at each use: a cache would outlive the optimizer's step.
    Backward computes in the dtypes that forward chose.
    """
    global _devices
    stop_casting()
    _devices = tuple(kinds)
    torch.set_autocast_cache_enabled(False)
    for kind in _devices:
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, True)
    names = ("backward", "grad")
    PatchHandle(Patch(torch.autograd, name, _as_it_is, compile="skip") for name in names)


def stop_casting() -> None:
    """Let torch's functions be as they were."""
    global _devices
    for kind in _devices:
        torch.set_autocast_enabled(kind, False)
    if _devices:
        torch.set_autocast_cache_enabled(True)
    _devices = ()


def casting() -> torch.dtype | None:
    """The half-precision dtype that functions are cast to here and now, or None."""
    for kind in _devices:
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


@contextmanager
def no_cast() -> Iterator[None]:
    """Let functions compute in the dtype of their inputs for a while."""
    with ExitStack() as stack:
        for kind in _devices:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _as_it_is(original: Function, *args: Any, **kwargs: Any) -> Any:
    with no_cast():
        return original(*args, **kwargs)
