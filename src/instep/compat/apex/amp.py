"""`from apex import amp`: the functions of Apex's amp, implemented by `instep.precision`.

Differences from Apex:

- It works on the CPU too.
- Functions are cast by PyTorch's autocast and its lists (on the CPU these are shorter).
- An overflow on any rank skips the step on all of them.
- O2's checkpoints hold the master weights, so that a resumed run continues bit for bit.
- A checkpoint that is loaded, or a broadcast, after the first step reaches the master weights too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from instep.compat.apex.parallel.distributed import DistributedDataParallel
from instep.distributed.rendezvous import bootstrap
from instep.process.patching import Patch, PatchHandle
from instep.training.amp.casting import active_dtype, cast, no_cast
from instep.training.amp.errors import PrecisionError
from instep.training.amp.mixed import Mixed, prepare

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

F = TypeVar("F", bound=Callable[..., Any])

_mixed: Mixed | None = None
_enabled = True


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Set the precision of models and optimizers; before DistributedDataParallel.

    Arguments are Apex's: an `opt_level` "O0" to "O3", and options of it overridden one by one
    (strings such as "128.0" and "True" are read). `verbosity=0` prints nothing.

    Returns:
        Models and optimizers in the shape given: one or a list of each; without optimizers only
        the models.

    Raises PrecisionError (a RuntimeError), and TypeError for what is neither a model nor a list.
    """
    global _mixed, _enabled
    _enabled = enabled
    given = models if optimizers is None else (models, optimizers)
    if not enabled:
        return given
    if not isinstance(models, nn.Module | list):
        raise TypeError(f"models is a module or a list of modules, not {type(models).__name__}.")
    if optimizers is not None and not _are_optimizers(optimizers):
        given_type = type(optimizers).__name__
        raise TypeError(f"optimizers is an optimizer or a list of optimizers, not {given_type}.")
    for model in [models] if isinstance(models, nn.Module) else models:
        if isinstance(model, DistributedDataParallel):
            raise PrecisionError.wrapped("in apex.parallel.DistributedDataParallel")
    log = functools.partial(_print_on_rank0, verbosity)
    _mixed = prepare(
        models,
        () if optimizers is None else optimizers,
        opt_level,
        num_losses=num_losses,
        tell=log,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        cast_model_outputs=cast_model_outputs,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    log(f"amp: {_mixed.options}")
    if _mixed.options.patch_torch_functions:
        PatchHandle(_registered)
    return given


def _are_optimizers(optimizers: Any) -> bool:
    """Whether these are optimizers: torch's, or a wrapper of one such as LARC."""
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    return all(hasattr(each, "step") and hasattr(each, "param_groups") for each in listed)


def _print_on_rank0(verbosity: int, line: str) -> None:
    if verbosity > 0 and bootstrap.current().rank == 0:
        print(line, flush=True)


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield `loss.float()` times its scale; at the end scale the gradients back, or skip the step.

    Arguments are Apex's (`model` is ignored); see `instep.precision.Mixed.scale`. Collective if the
    scale is dynamic. Raises PrecisionError before `initialize`.
    """
    if not _enabled:
        yield loss
        return
    with _initialized().scale(
        loss,
        optimizers,
        loss_id,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    ) as scaled:
        yield scaled


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer steps: with O2 the float32 master weights."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The scale of each loss, and the number of its steps since the last overflow."""
    state = {} if destination is None else destination
    if _mixed is not None:
        state.update(_mixed.state_dict())
    return state


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Set the scales, after `initialize`. Prints a line if the number of losses differs.

    Raises PrecisionError for keys that are no loss's.
    """
    mixed = _initialized()
    unknown = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unknown:
        raise PrecisionError(
            f"this state holds {', '.join(unknown)}, which are no loss scales. "
            "Load what amp.state_dict() returned."
        )
    if len(state_dict) != len(mixed.scalers):
        _print_on_rank0(
            1, f"amp: {len(state_dict)} loss scales saved, {len(mixed.scalers)} losses here."
        )
    mixed.load_state_dict(state_dict)


def _initialized() -> Mixed:
    if _mixed is None:
        raise PrecisionError(
            "amp.initialize(model, optimizer, opt_level=...) must come before this."
        )
    return _mixed


# ------------------------------------------------------------------- casts of the user's own


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, functions compute in the dtype of their inputs (O1)."""
    with no_cast():
        yield


def half_function(function: F) -> F:
    """`function`, with floating-point arguments cast to half precision (O1)."""
    return _with_casts(function, lambda values, half: cast(values, half))


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
        for leaf in torch.utils._pytree.tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return cast(values, functools.reduce(torch.promote_types, dtypes)) if dtypes else values
