"""Models and optimizers prepared for mixed precision, and their losses' scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from instep.distributed.identity import torch_devices
from instep.training.amp.casting import (
    cast_functions,
    cast_inputs_and_outputs,
    cast_model,
    stop_casting,
)
from instep.training.amp.errors import PrecisionError
from instep.training.amp.levels import HALVES, Options, choose_options
from instep.training.amp.loss_scaler import LossScaler, any_rank_found
from instep.training.amp.master_weights import save_in_float32, share_digits
from instep.training.amp.optimizer_steps import OptimizerSteps, Report, is_prepared, steps_of
from instep.training.replicas import is_replicated

_prepared: WeakSet[nn.Module] = WeakSet()


def prepare(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Any = (),
    level: str = "O1",
    *,
    dtype: torch.dtype = torch.float16,
    num_losses: int = 1,
    tell: Report = lambda what: None,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    cast_model_outputs: torch.dtype | None = None,
    allow_half: bool = False,
    **overrides: Any,
) -> Mixed:
    """Set the precision of models and their optimizers. Before replicate or any wrapper.

        amp = instep.precision.prepare(model, optimizer, "O1", dtype=torch.bfloat16)
        model = instep.replicate(model)
        ...
        with amp.scale(loss) as scaled:
            scaled.backward()
        optimizer.step()

    Levels: "O0" float32; "O1" torch's functions choose (autocast, without an end: losses too);
    "O2" the model in half precision but for batch normalisation, float32 master weights in the
    optimizer; "O3" all of it in half precision.

    Args:
        models: in float32; changed in place, and still the same objects.
        optimizers: one, or several, of all parameters; changed in place.
        level: the options to start from.
        dtype: float16 or bfloat16.
        num_losses: how many losses have a scale of their own.
        tell: called with a sentence when a step is skipped.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.
        cast_model_outputs: the dtype of what the models return; by default float32 if the
            parameters are cast, else what the models return.
        allow_half: take models some of whose parameters are in half precision already.
        overrides: fields of `instep.precision.Options` other than the level's.

    Returns:
        A `Mixed`, whose `scale` is around each backward.

    A later call with other models replaces or ends the casts of an earlier O1.
    Raises PrecisionError.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    options = choose_options(level, dtype, **overrides)
    for model in models:
        _check_model(model, allow_half)
    if any(is_prepared(optimizer) for optimizer in optimizers):
        raise PrecisionError.twice("optimizer")
    before: dict[Tensor, Tensor] = {p: p.data for model in models for p in model.parameters()}
    for model in models:
        _cast(model, options, cast_model_outputs)
        _prepared.add(model)
    if options.patch_torch_functions:
        cast_functions(dtype, _device_types(models))
    else:
        stop_casting()
    for optimizer in optimizers:
        OptimizerSteps(optimizer, options, tell, before)
    bounds = (min_loss_scale, max_loss_scale)
    scalers = [LossScaler(options.loss_scale, *bounds) for _ in range(num_losses)]
    return Mixed(options, optimizers, scalers)


class Mixed:
    """Scales the losses of models that `prepare` has prepared."""

    def __init__(self, options: Options, optimizers: list[Any], scalers: list[LossScaler]) -> None:
        self.options = options
        self.scalers = scalers
        """One for each loss."""
        self._optimizers = optimizers

    @contextmanager
    def scale(
        self,
        loss: Tensor,
        optimizers: Any = None,
        loss_id: int = 0,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Iterator[Tensor]:
        """Yield the loss in float32 times its scale; at the end gradients are divided by the scale.

        If they hold an inf or a NaN on any rank, all ranks skip the optimizers' next step and
        halve the scale.

        Args:
            loss: any shape; backward is called on what the context yields.
            optimizers: those whose parameters this backward reaches; all by default.
            loss_id: which of the losses this is.
            delay_unscale: leave the gradients scaled: another backward before the step will add
                to them.
            delay_overflow_check: unscale, but neither check for overflow nor change the scale.

        Collective where the scale is dynamic, and at an optimizer's first backward if it has
        master weights. Raises PrecisionError.
        """
        scaler = self.scaler(loss_id)
        if not self.options.scales:
            yield loss.float()
            return
        steps = [steps_of(optimizer) for optimizer in self._listed(optimizers)]
        new = [each for each in steps if not each.has_begun]
        if new and self.options.master_weights:
            share_digits([master for each in new for master in each.masters])
        for each in steps:
            each.begin_backward(scaler.scale)
        yield loss.float() * scaler.scale
        if delay_unscale:
            return
        found = [flag for each in steps for flag in each.end_backward()]
        if delay_overflow_check:
            return
        overflowed = scaler.dynamic and any_rank_found(found, _device_of(steps, loss))
        if scaler.update(overflowed):
            why = (
                f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale "
                f"to {scaler.scale}"
            )
            for each in steps:
                each.skip_next(why)

    def scaler(self, loss_id: int) -> LossScaler:
        """The scale of one loss. Raises PrecisionError if there are fewer losses."""
        if loss_id not in range(len(self.scalers)):
            raise PrecisionError(
                f"loss {loss_id!r} does not exist: num_losses is {len(self.scalers)}, and losses "
                "are counted from 0. Set num_losses with the precision."
            )
        return self.scalers[loss_id]

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The scales; the same on all ranks."""
        return {
            f"loss_scaler{k}": {"loss_scale": scaler.scale, "unskipped": scaler.good}
            for k, scaler in enumerate(self.scalers)
        }

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Set the scales of the losses that are in `state`. Raises KeyError."""
        for k, scaler in enumerate(self.scalers):
            if (saved := state.get(f"loss_scaler{k}")) is not None:
                scaler.scale, scaler.good = saved["loss_scale"], int(saved["unskipped"])

    def _listed(self, optimizers: Any) -> list[Any]:
        if optimizers is None:
            return self._optimizers
        return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]


def _device_types(models: list[nn.Module]) -> list[str]:
    """The types of device of the models, now and after a move to the accelerator."""
    kinds = {p.device.type for model in models for p in model.parameters()}
    found = torch_devices.accelerator_type()
    return sorted(kinds if found is None else kinds | {found})


def _device_of(steps: list[OptimizerSteps], loss: Tensor) -> torch.device:
    return steps[0].device if steps else loss.device


def _check_model(model: nn.Module, allow_half: bool) -> None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise PrecisionError.wrapped(f"in {type(model).__name__}")
    if is_replicated(model):
        raise PrecisionError.wrapped("replicated")
    if model in _prepared:
        raise PrecisionError.twice("model")
    if allow_half:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise PrecisionError.not_float32(f"parameter {name}", parameter.dtype)
    for name, buffer in model.named_buffers():
        if buffer.dtype in HALVES:
            raise PrecisionError.not_float32(f"buffer {name}", buffer.dtype)


def _cast(model: nn.Module, options: Options, outputs: torch.dtype | None) -> None:
    inside = options.cast_model_type
    if inside is not None:
        cast_model(model, inside, keep_batchnorm=bool(options.keep_batchnorm_fp32))
        outputs = outputs or torch.float32
        if inside in HALVES:
            save_in_float32(model)
    if outputs is not None:
        cast_inputs_and_outputs(model, inside, outputs)
