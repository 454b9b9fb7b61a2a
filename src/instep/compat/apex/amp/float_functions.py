"""The functions that O1 computes in float32, where PyTorch's autocast does not.

`Tensor.cpu` is one of them everywhere, the others on a CPU: those of Apex's lists, which autocast
has on GPUs; `binary_cross_entropy` refuses half precision, and so do those that write in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from instep.compat.apex.amp._amp_state import _amp_state
from instep.process.patching import patches
from instep.process.torch_private.tensors import tree_map_only
from instep.training.amp.casting import active_dtype, no_cast
from instep.training.amp.levels import HALVES


def _in_float32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if active_dtype() is not None:
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
    return function(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _refuse_half(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apex's rule: a sigmoid in half precision is too coarse for the logarithm of 1 - p."""
    if active_dtype() is None:
        return function(*args, **kwargs)
    given = args[0] if args else kwargs.get("input")
    if not _amp_state.allow_banned and isinstance(given, Tensor) and given.dtype in HALVES:
        raise NotImplementedError(
            "amp computes no binary_cross_entropy of half precision. Use BCEWithLogitsLoss without "
            "a sigmoid before it, or amp.register_float_function(torch, 'sigmoid'), or "
            "amp.init(allow_banned=True)."
        )
    args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
    with no_cast():
        return function(*args, **kwargs)


def _refuse_in_place(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apex's rule: the result would be in float32, which a tensor of half precision cannot hold."""
    if active_dtype() is not None and isinstance(args[0], Tensor) and args[0].dtype in HALVES:
        raise NotImplementedError(
            "amp computes this function in float32, and not in place of a tensor in half "
            "precision. Call it without the underscore at the end of its name."
        )
    return function(*args, **kwargs)


_OF_BOTH = (
    "acos asin cosh cumprod cumsum dist erfinv exp expm1 log log10 log2 log_softmax norm pow prod "
    "reciprocal renorm rsqrt sinh softmax std sum tan var"
)
_IN_PLACE = " ".join(name for each in _OF_BOTH.split() if hasattr(Tensor, name := f"{each}_"))

MOVES = patches(
    "Apex casts to float32 what goes to a CPU, whose NumPy knows no bfloat16; autocast does not.",
    (Tensor, "cpu", _in_float32),
)
FLOAT_FUNCTIONS = patches(
    "On a CPU autocast leaves them in half precision; Apex computes them in float32.",
    (torch, _OF_BOTH, _in_float32),
    (Tensor, f"{_OF_BOTH} __pow__ __rpow__", _in_float32),
    (
        functional,
        "cosine_similarity gelu group_norm layer_norm local_response_norm log_softmax normalize "
        "softmax softmin softplus",
        _in_float32,
    ),
    (functional, "binary_cross_entropy", _refuse_half),
    (Tensor, f"{_IN_PLACE} __ipow__", _refuse_in_place),
)
