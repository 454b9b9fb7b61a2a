"""The options of each level, and the checks of what overrides them. Pure.

The levels and the names of their options are those of NVIDIA Apex.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from instep.training.amp.errors import PrecisionError

Level = Literal["O0", "O1", "O2", "O3"]
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a level does. None: the level leaves this as it is."""

    opt_level: Level
    """The level from which these options started."""
    cast_model_type: torch.dtype | None
    """The dtype of the model's parameters and buffers; inputs are cast to it, outputs back."""
    patch_torch_functions: bool
    """Whether torch's functions choose their dtype by themselves (autocast)."""
    keep_batchnorm_fp32: bool | None
    """Whether batch normalisation stays in float32 in a model that is cast."""
    master_weights: bool | None
    """Whether the optimizer updates float32 copies of half-precision parameters."""
    loss_scale: float | Literal["dynamic"]
    """The factor of losses before backward."""

    @property
    def scales(self) -> bool:
        """Whether gradients must be unscaled or copied between backward and step."""
        return bool(self.master_weights) or self.loss_scale != 1.0


def levels(dtype: torch.dtype) -> dict[str, Options]:
    """The four levels for one half-precision dtype.

    bfloat16 has the range of float32, so that its losses need no scaling.
    """
    scaled: float | Literal["dynamic"] = "dynamic" if dtype is torch.float16 else 1.0
    return {
        "O0": Options(
            opt_level="O0",
            cast_model_type=torch.float32,
            patch_torch_functions=False,
            keep_batchnorm_fp32=None,
            master_weights=False,
            loss_scale=1.0,
        ),
        "O1": Options(
            opt_level="O1",
            cast_model_type=None,
            patch_torch_functions=True,
            keep_batchnorm_fp32=None,
            master_weights=None,
            loss_scale=scaled,
        ),
        "O2": Options(
            opt_level="O2",
            cast_model_type=dtype,
            patch_torch_functions=False,
            keep_batchnorm_fp32=True,
            master_weights=True,
            loss_scale=scaled,
        ),
        "O3": Options(
            opt_level="O3",
            cast_model_type=dtype,
            patch_torch_functions=False,
            keep_batchnorm_fp32=False,
            master_weights=False,
            loss_scale=1.0,
        ),
    }


def choose_options(level: str, dtype: torch.dtype = torch.float16, **overrides: Any) -> Options:
    """The options of a level with those overrides that are not None.

    Raises PrecisionError for an unknown level, override or value, and for an override that
    contradicts the level.
    """
    if dtype not in HALVES:
        raise PrecisionError.option("dtype", dtype, "torch.float16 or torch.bfloat16")
    table = levels(dtype)
    if level not in get_args(Level):
        raise PrecisionError(
            f"unknown level {level!r}; known are {', '.join(table)} "
            "(the letter O and a digit, not two digits)."
        )
    if unknown := [name for name in overrides if name not in _PARSERS]:
        raise PrecisionError(f"unknown option {unknown[0]!r}; known are {', '.join(_PARSERS)}.")
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        _check_override(level, name, value)
    parsed: dict[str, Any] = {name: _PARSERS[name](value) for name, value in given.items()}
    return replace(table[level], **parsed)


def _check_override(level: str, name: str, value: object) -> None:
    why = ""
    if level == "O1":
        why = {
            "cast_model_type": "its parameters stay in float32, and functions are cast instead. "
            "O2 and O3 cast the model.",
            "keep_batchnorm_fp32": "its batch normalisation is in float32 anyway. Leave it out.",
            "master_weights": "its parameters are in float32 themselves. Leave it out.",
        }.get(name, "")
        if name == "cast_model_type" and (value is torch.float32 or value is False):
            why = ""
    elif name == "patch_torch_functions" and value:
        why = "only O1 casts functions. Choose O1."
    if why:
        raise PrecisionError(f"{name}={value!r} contradicts level {level}: {why}")


def _parse_dtype(value: object) -> torch.dtype | None:
    if value is False:  # Apex's word for parameters that are left as they are
        return None
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise PrecisionError.option("cast_model_type", value, "a floating-point torch.dtype")
    return value


def _parse_bool(name: str, value: object) -> bool:
    known = {"True": True, "False": False, True: True, False: False}
    if not isinstance(value, str | bool) or value not in known:
        raise PrecisionError.option(name, value, "True or False (or these as strings)")
    return known[value]


def _parse_scale(value: object) -> float | Literal["dynamic"]:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise PrecisionError.option("loss_scale", value, '"dynamic" or a number above 0')
    return scale


_PARSERS = {
    "cast_model_type": _parse_dtype,
    "patch_torch_functions": lambda value: _parse_bool("patch_torch_functions", value),
    "keep_batchnorm_fp32": lambda value: _parse_bool("keep_batchnorm_fp32", value),
    "master_weights": lambda value: _parse_bool("master_weights", value),
    "loss_scale": _parse_scale,
}
