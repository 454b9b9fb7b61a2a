"""The functions that O1 computes in half precision on a CPU, where PyTorch's autocast does not.

Recurrent layers and cells: autocast knows those of GPUs only, and on a CPU leaves part of their
arithmetic in float32, or names a kernel that this CPU does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.process.patching import patches
from instep.process.torch_private.modules import VF
from instep.training.amp.casting import active_dtype, cast, no_cast


def _in_half(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if (half := active_dtype()) is None:
        return function(*args, **kwargs)
    args, kwargs = cast((args, kwargs), half)
    with no_cast():
        return function(*args, **kwargs)


HALF_FUNCTIONS = patches(
    "On a CPU autocast computes them in float32, or not at all; Apex in half precision.",
    (VF, "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell", _in_half),
)
