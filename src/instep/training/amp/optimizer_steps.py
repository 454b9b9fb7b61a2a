"""An optimizer under mixed precision: it steps with complete and unscaled gradients, or skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from instep.process.patching import Function
from instep.training.amp.casting import no_cast
from instep.training.amp.errors import PrecisionError
from instep.training.amp.levels import HALVES, Options
from instep.training.amp.loss_scaler import unscale
from instep.training.amp.master_weights import MasterWeight
from instep.training.drift.optimizers import parameters_of
from instep.training.optimizer_shards.sharded_step import PRECISION

Report = Callable[[str], None]


def steps_of(optimizer: object) -> OptimizerSteps:
    """The state of an optimizer whose precision is set. Raises PrecisionError for others."""
    if not is_prepared(optimizer):
        raise PrecisionError(
            "this optimizer's precision was never set; pass it to the same call as its model "
            "before scaling a loss for it."
        )
    steps: OptimizerSteps = getattr(optimizer, PRECISION)
    return steps


def is_prepared(optimizer: object) -> bool:
    """Whether an optimizer's precision is set."""
    return hasattr(optimizer, PRECISION)


class OptimizerSteps:
    """The `step`, `zero_grad` and `add_param_group` of an optimizer under mixed precision.

    They replace the methods on the object itself: its class stays as it was, and a learning-rate
    schedule made before or after sees every step, skipped ones too. Any object with these methods,
    `param_groups` and `state` can be used.
    """

    def __init__(
        self,
        optimizer: Any,
        options: Options,
        tell: Report,
        before: dict[Tensor, Tensor],
    ) -> None:
        """`before`: values that parameters had before they were cast; those used are removed."""
        self.masters: list[MasterWeight] = []
        self.has_begun = False
        """Whether there was a backward of a scaled loss."""
        self._scale: float | None = None  # the factor by which gradients are multiplied now
        self._optimizer = optimizer
        self._options = options
        self._tell = tell
        self._skip: str | None = None
        if options.master_weights:
            for group in optimizer.param_groups:
                group["params"] = [self._to_step(p, before) for p in group["params"]]
        if optimizer.state and options.cast_model_type is not None:
            # Its state is of earlier steps: convert it to the dtype of the parameters now.
            optimizer.load_state_dict(optimizer.state_dict())
        self._originals = {name: getattr(optimizer, name) for name in _METHODS}
        for name, original in self._originals.items():
            setattr(optimizer, name, MethodType(_in_place_of(original, name), optimizer))
        setattr(optimizer, PRECISION, self)

    @property
    def device(self) -> torch.device:
        """The device of its first parameter."""
        return parameters_of(self._optimizer)[0].device

    # ------------------------------------------------------------------ around a backward

    def begin_backward(self, scale: float) -> None:
        """Prepare for a backward of a loss times `scale`.

        What is in `.grad` is multiplied too, so that it can be summed with the new gradients: of
        several losses, of several batches, over the ranks.
        """
        self.has_begun = True
        scaled = list(self._without_copy())
        if self._scale is None:
            for master in self.masters:
                master.begin_backward(scale)
        else:
            scaled += [master.parameter for master in self.masters]
        if (factor := scale / (self._scale or 1.0)) != 1.0:
            for parameter in scaled:
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(factor)
        self._scale = scale

    def end_backward(self) -> list[Tensor]:
        """Divide the gradients by the scale; returns the flags of `unscale`."""
        assert self._scale is not None
        scaled = [(master, master.scaled_grad()) for master in self.masters]
        computed = [(master, grad) for master, grad in scaled if grad is not None]
        grads = [p.grad for p in self._without_copy() if p.grad is not None]
        found = unscale([*grads, *(grad for _, grad in computed)], self._scale)
        for master, grad in computed:
            master.add_grad(grad)
        self._scale = None
        return found

    def skip_next(self, why: str) -> None:
        """Skip the next step.

        Its gradients become zeros, so that another loss's gradients are checked by themselves.
        """
        self._skip = why
        for parameter in parameters_of(self._optimizer):
            if parameter.grad is not None:
                parameter.grad.detach().zero_()

    def _without_copy(self) -> Iterator[Tensor]:
        """The parameters without a float32 copy."""
        copies = {id(master.copy) for master in self.masters}
        return (p for p in parameters_of(self._optimizer) if id(p) not in copies)

    # --------------------------------------------------------------------- the three methods

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, or nothing where gradients have overflowed."""
        closure = kwargs.get("closure", args[0] if args else None)
        if closure is not None and self._options.scales:
            raise PrecisionError(
                "optimizer.step(closure) under loss scaling: the closure's gradients would be "
                "neither scaled nor unscaled. Compute the gradients first and call step() without "
                "a closure; LBFGS needs level O0."
            )
        if self._scale is not None:
            raise PrecisionError(
                "optimizer.step() while the gradients are still scaled: the last scale_loss had "
                "delay_unscale=True. Leave that out in the last backward before a step."
            )
        if self._skip is not None:
            self._tell(self._skip)
            self._skip = None
            self._optimizer._opt_called = True  # else a schedule warns of the wrong order
            result = None
        else:
            for master in self.masters:
                master.read_parameter()
            with no_cast():
                result = self._originals["step"](*args, **kwargs)
            for master in self.masters:
                master.write_parameter()
        for master in self.masters:
            master.copy.grad = None
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients of the model too."""
        for master in self.masters:
            master.parameter.grad = None
        self._scale = None
        self._originals["zero_grad"](*args, **kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group whose half-precision parameters get float32 copies."""
        if self._options.master_weights:
            given = group["params"]
            given = [given] if isinstance(given, Tensor) else given
            if not isinstance(given, set):  # the optimizer raises an error for a set
                group["params"] = [self._to_step(p, {}) for p in given]
        self._originals["add_param_group"](group)

    def _to_step(self, parameter: Tensor, before: dict[Tensor, Tensor]) -> Tensor:
        """The tensor that the optimizer updates for a parameter: itself, or its float32 copy."""
        if parameter.dtype not in HALVES or not parameter.requires_grad:
            return parameter
        master = MasterWeight(parameter, before.pop(parameter, None))
        self.masters.append(master)
        state = self._optimizer.state
        if parameter in state:
            state[master.copy] = state.pop(parameter)
        return master.copy


_METHODS = ("step", "zero_grad", "add_param_group")


def _in_place_of(original: Function, name: str) -> Function:
    """The method of that name of an optimizer's `steps_of`, with the attributes of the original: a
    learning-rate schedule that was made before has set one, and looks for it."""

    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(steps_of(optimizer), name)(*args, **kwargs)

    vars(method).update(getattr(original, "__dict__", {}))
    return method
