"""`apex.amp.frontend`: `initialize`, and the state of the loss scales."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from instep.compat.apex.amp._amp_state import LossScaler, Properties, _amp_state, maybe_print
from instep.compat.apex.amp.amp import begin_casts, default_half
from instep.compat.apex.amp.handle import initialized
from instep.compat.apex.parallel.distributed import DistributedDataParallel
from instep.distributed.rendezvous import bootstrap
from instep.training.amp.errors import PrecisionError
from instep.training.amp.levels import HALVES
from instep.training.amp.mixed import prepare

_SCALED = {"O1": "dynamic", "O2": "dynamic"}
"""The scales of these levels, which skip a step that overflows in bfloat16 too."""


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
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Set the precision of models and optimizers; before DistributedDataParallel.

    Arguments are Apex's: an `opt_level` "O0" to "O3", and options of it overridden one by one
    (strings such as "128.0" and "True" are read). `patch_torch_functions_type`, of ROCm's Apex, is
    the dtype to which O1 casts functions.

    Half precision is bfloat16 if all is on the CPU and neither `cast_model_type` nor
    `patch_torch_functions_type` is given: the first time rank 0 prints a line about it to stderr.
    Otherwise it is float16. `verbosity=0` prints nothing else.

    Returns:
        Models and optimizers in the shape given: one or a list of each; without optimizers only
        the models.

    Raises PrecisionError (a RuntimeError), and TypeError for what is neither a model nor a list.
    """
    _amp_state.verbosity = verbosity
    _amp_state.is_disabled = not enabled
    given = models if optimizers is None else (models, optimizers)
    if not enabled:
        _amp_state.opt_properties = Properties(enabled=False)
        return given
    _check_arguments(models, optimizers)
    listed = [models] if isinstance(models, nn.Module) else models
    mixed = prepare(
        models,
        () if optimizers is None else optimizers,
        opt_level,
        dtype=_half(
            listed, opt_level, cast_model_type, patch_torch_functions, patch_torch_functions_type
        ),
        num_losses=num_losses,
        tell=functools.partial(maybe_print, rank0=True),
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        cast_model_outputs=cast_model_outputs,
        allow_half=_amp_state.allow_incoming_model_not_fp32,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=_SCALED.get(opt_level) if loss_scale is None else loss_scale,
    )
    _amp_state.mixed = mixed
    _amp_state.opt_properties = Properties(mixed.options, enabled=True)
    _amp_state.loss_scalers = [LossScaler(scaler) for scaler in mixed.scalers]
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    maybe_print(f"amp: {mixed.options}", rank0=True)
    if mixed.options.patch_torch_functions:
        begin_casts(verbosity > 1)
    return given


def _check_arguments(models: Any, optimizers: Any) -> None:
    """Raises TypeError for another type, and PrecisionError for a model that is wrapped."""
    if not isinstance(models, nn.Module | list):
        raise TypeError(f"models is a module or a list of modules, not {type(models).__name__}.")
    if optimizers is not None and not _are_optimizers(optimizers):
        given = type(optimizers).__name__
        raise TypeError(f"optimizers is an optimizer or a list of optimizers, not {given}.")
    listed = [models] if isinstance(models, nn.Module) else models
    if any(isinstance(model, DistributedDataParallel) for model in listed):
        raise PrecisionError.wrapped("in apex.parallel.DistributedDataParallel")


def _half(
    models: list[nn.Module],
    opt_level: str,
    cast_model_type: torch.dtype | None,
    patch_torch_functions: bool | None,
    functions_type: torch.dtype | None,
) -> torch.dtype:
    """The half-precision dtype of a level. Raises PrecisionError."""
    if functions_type is not None and opt_level != "O1":
        raise PrecisionError(
            f"patch_torch_functions_type={functions_type!r} contradicts level {opt_level}: only O1 "
            "casts functions. O2 and O3 take cast_model_type."
        )
    if functions_type is not None and functions_type not in HALVES:
        allowed = "torch.float16 or torch.bfloat16"
        raise PrecisionError.option("patch_torch_functions_type", functions_type, allowed)
    casts_functions = opt_level == "O1" and patch_torch_functions not in (False, "False")
    casts_model = opt_level in ("O2", "O3") and cast_model_type is None
    if functions_type is None and (casts_functions or casts_model):
        return default_half(models)
    return functions_type or torch.float16  # without effect where no function is cast


def _are_optimizers(optimizers: Any) -> bool:
    """Whether these are optimizers: torch's, or a wrapper of one such as LARC."""
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    return all(hasattr(each, "step") and hasattr(each, "param_groups") for each in listed)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The scale of each loss, and the number of its steps since the last overflow."""
    state = {} if destination is None else destination
    if _amp_state.mixed is not None:
        state.update(_amp_state.mixed.state_dict())
    return state


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Set the scales, after `initialize`. Prints a line if the number of losses differs.

    Raises PrecisionError for keys that are no loss's.
    """
    mixed = initialized()
    unknown = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unknown:
        raise PrecisionError(
            f"this state holds {', '.join(unknown)}, which are no loss scales. "
            "Load what amp.state_dict() returned."
        )
    if len(state_dict) != len(mixed.scalers) and bootstrap.current().rank == 0:
        counts = f"{len(state_dict)} loss scales saved, {len(mixed.scalers)} losses here"
        print(f"amp: {counts}.", flush=True)
    mixed.load_state_dict(state_dict)
