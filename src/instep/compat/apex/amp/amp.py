"""`apex.amp.amp`: `init`, casts of the user's own functions, and the dtype that they get."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from instep.compat.apex.amp._amp_state import _amp_state
from instep.compat.apex.amp.float_functions import FLOAT_FUNCTIONS, MOVES
from instep.compat.apex.amp.half_functions import HALF_FUNCTIONS
from instep.compat.apex.amp.handle import AmpHandle, NoOpHandle
from instep.distributed.identity import torch_devices
from instep.distributed.rendezvous import bootstrap
from instep.process import print_line
from instep.process.patching import Patch, PatchHandle
from instep.process.torch_private.tensors import tree_leaves
from instep.training.amp.casting import active_dtype, cast, cast_functions

F = TypeVar("F", bound=Callable[..., Any])


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Cast torch's functions from now on, as O1 does; `handle._deactivate()` ends it.

    `initialize` calls this for O1 by itself. On a CPU the dtype is bfloat16, otherwise float16.
    The handle scales no loss, so that `loss_scale` has no meaning; nor has `enable_caching`:
    weights are cast at each use. `allow_banned` lets binary_cross_entropy take half precision, on a
    CPU; on a GPU PyTorch's autocast refuses it.
    """
    if not enabled:
        return NoOpHandle(verbose)
    devices = {"cpu", torch_devices.accelerator_type() or "cpu"}
    cast_functions(default_half(()), sorted(devices))
    return begin_casts(verbose, allow_banned)


def begin_casts(verbose: bool = False, allow_banned: bool = False) -> AmpHandle:
    """The handle of casts that have begun; the functions that users registered are cast too."""
    PatchHandle(MOVES)
    if torch_devices.accelerator_type() is None:
        PatchHandle([*FLOAT_FUNCTIONS, *HALF_FUNCTIONS])
    PatchHandle(_registered)
    _amp_state.allow_banned = allow_banned
    _amp_state.handle = handle = AmpHandle(verbose)
    return handle


def default_half(models: Iterable[nn.Module]) -> torch.dtype:
    """bfloat16 where all is on the CPU, and the first time a line that says so; else float16."""
    devices = {p.device.type for model in models for p in model.parameters()}
    if torch_devices.accelerator_type() is not None or devices - {"cpu"}:
        return torch.float16
    _say_bfloat16()
    return torch.bfloat16


@functools.cache
def _say_bfloat16() -> None:
    if bootstrap.current().rank == 0:
        print_line(
            "amp computes in bfloat16 here, since float16 is about 100 times slower on "
            "CPUs. For float16 pass amp.initialize patch_torch_functions_type=torch.float16 (O1) "
            "or cast_model_type=torch.float16 (O2, O3)."
        )


def half_function(function: F) -> F:
    """`function`, with floating-point arguments cast to half precision (O1)."""
    return _with_casts(function, cast)


def float_function(function: F) -> F:
    """`function`, with floating-point arguments cast to float32 (O1)."""
    return _with_casts(function, lambda values, half: cast(values, torch.float32))


def promote_function(function: F) -> F:
    """`function`, with floating-point arguments cast to the widest dtype among them (O1)."""
    return _with_casts(function, lambda values, half: _promote(values))


def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` a half_function when `initialize` chooses O1.

    Raises ValueError if there is no such function.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` a float_function; see `register_half_function`."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` a promote_function; see `register_half_function`."""
    _register(module, name, promote_function)


_registered: list[Patch] = []


def _register(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"{getattr(module, '__name__', module)} has no function {name!r}.")
    _registered.append(Patch(module, name, wrap, factory=True))


def _with_casts(function: F, cast_all: Callable[[Any, torch.dtype], Any]) -> F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (half := active_dtype()) is not None:
            args, kwargs = cast_all((args, kwargs), half)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _promote(values: Any) -> Any:
    dtypes = [
        leaf.dtype
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return cast(values, functools.reduce(torch.promote_types, dtypes)) if dtypes else values
