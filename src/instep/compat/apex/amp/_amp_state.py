"""`apex.amp._amp_state`: what `initialize` has set. The object and the module of this name are one.

Before `initialize` the state has no `opt_properties`, no `loss_scalers` and no `handle`, as Apex's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from instep.distributed.rendezvous import bootstrap
from instep.training.amp.errors import PrecisionError
from instep.training.amp.levels import Options
from instep.training.amp.loss_scaler import LossScaler as InstepLossScaler
from instep.training.amp.mixed import Mixed


class AmpState(ModuleType):
    """The state of amp in this process."""

    hard_override = False
    allow_incoming_model_not_fp32 = False
    """Whether `initialize` takes models with parameters in half precision."""
    allow_banned = False
    """Whether O1 computes binary_cross_entropy of half precision, in float32 (on a CPU)."""
    verbosity = 1
    """0: amp prints nothing."""
    min_loss_scale: float | None = None
    max_loss_scale = 2.0**24
    mixed: Mixed | None = None
    """What scales the losses; None before `initialize`, or if that was not enabled."""
    is_disabled = False
    """Whether the last `initialize` was called with enabled=False."""
    opt_properties: Properties
    """The options of the last `initialize`."""
    loss_scalers: list[LossScaler]
    """One for each loss."""
    handle: Any
    """The AmpHandle of the casts of torch's functions (O1)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "hard_override" and value:
            raise PrecisionError(
                "hard_override cannot be set: a contradiction of options stays an error. Leave out "
                "the option that the error names."
            )
        super().__setattr__(name, value)


class Properties:
    """The options of a level, as attributes and in the dict `options`. Setting one changes nothing
    of models that are initialized."""

    def __init__(self, options: Options | None = None, *, enabled: bool) -> None:
        self.options: dict[str, Any] = {
            "enabled": enabled,
            "opt_level": None if options is None else options.opt_level,
            "cast_model_type": None if options is None else options.cast_model_type,
            "patch_torch_functions": options is not None and options.patch_torch_functions,
            "keep_batchnorm_fp32": None if options is None else options.keep_batchnorm_fp32,
            "master_weights": None if options is None else options.master_weights,
            "loss_scale": 1.0 if options is None else options.loss_scale,
        }

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("options", ()):
            return self.options[name]
        raise AttributeError(f"amp has no option {name!r}; it has {', '.join(self.options)}.")


class LossScaler:
    """The scale of one loss under Apex's names. What is written here counts from the next backward.

    Write the same on all ranks.
    """

    def __init__(self, scaler: InstepLossScaler) -> None:
        self._scaler = scaler

    def loss_scale(self) -> float:
        """The factor of this loss."""
        return self._scaler.scale

    @property
    def dynamic(self) -> bool:
        """Whether overflows change the factor."""
        return self._scaler.dynamic

    @property
    def _loss_scale(self) -> float:
        return self._scaler.scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._scaler.scale = scale

    @property
    def _unskipped(self) -> int:
        return self._scaler.good

    @_unskipped.setter
    def _unskipped(self, steps: int) -> None:
        self._scaler.good = steps

    @property
    def _min_loss_scale(self) -> float | None:
        return self._scaler.least or None

    @_min_loss_scale.setter
    def _min_loss_scale(self, scale: float | None) -> None:
        self._scaler.least = scale or 0.0

    @property
    def _max_loss_scale(self) -> float:
        return self._scaler.most

    @_max_loss_scale.setter
    def _max_loss_scale(self, scale: float) -> None:
        self._scaler.most = scale

    @property
    def _scale_seq_len(self) -> int:
        return self._scaler.window

    @_scale_seq_len.setter
    def _scale_seq_len(self, steps: int) -> None:
        self._scaler.window = steps

    @property
    def _has_overflow(self) -> bool:
        return self._scaler.overflowed

    @property
    def _overflow_buf(self) -> Tensor:
        return torch.tensor([self._scaler.overflowed], dtype=torch.int32, device="cpu")


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer steps: with O2 the float32 master weights."""
    for group in optimizer.param_groups:
        yield from group["params"]


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print a line unless `verbosity` is 0; with `rank0` only on rank 0."""
    if _amp_state.verbosity > 0 and not (rank0 and bootstrap.current().rank):
        print(msg, flush=True)


_amp_state = cast(AmpState, sys.modules[__name__])
_amp_state.__class__ = AmpState
