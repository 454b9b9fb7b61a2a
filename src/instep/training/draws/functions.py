"""The functions of torch that draw, and are replaced in replicas, besides those of dropout."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from instep.process.patching import Function, Patch
from instep.process.torch_private.devices import device_constructors
from instep.process.torch_private.modules import VF
from instep.training import forward_calls
from instep.training.draws.batch_draws import BatchDrawMode
from instep.training.draws.replica_draws import next_draw
from instep.training.forward_calls import ForwardCall
from instep.training.random_streams import restoring_default_generators

device_constructors()  # torch looks once at what takes a default device: before it is replaced
_FACTORIES = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal"),
    *("randperm", "bernoulli", "multinomial", "poisson", "binomial"),
    *("_standard_gamma", "_sample_dirichlet", "rrelu", "rrelu_"),
)
_DROPOUTS = (
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
)
_METHODS = (
    *("bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_", "random_"),
)

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


_drawing: list[ForwardCall | None] = []
"""The calls in which a function draws now, which may call others: such a function's own draws, or
the trial of a forward."""


def _is_drawing() -> bool:
    return bool(_drawing) and _drawing[-1] is forward_calls.current()


def _draw(original: Function, *args: Any, **kwargs: Any) -> Any:
    """A function that draws: for the whole batch in the forward of a replica."""
    if _is_drawing():
        return original(*args, **kwargs)
    draw, call = next_draw(is_noise=True)
    if draw is None or draw.block is None:
        return original(*args, **kwargs)
    _drawing.append(forward_calls.current())
    try:
        with restoring_default_generators(), BatchDrawMode(draw, call):
            return original(*args, **kwargs)
    finally:
        _drawing.pop()


def _draw_into(original: Function, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A method that fills a tensor; outside of a forward it initialises parameters."""
    if isinstance(x, nn.Parameter) and forward_calls.current() is None:
        return original(x, *args, **kwargs)
    return _draw(original, x, *args, **kwargs)


def _attention(
    original: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """F.scaled_dot_product_attention: other kernels than "math" draw inside of themselves."""
    rest = (query, key, value, attn_mask, dropout_p, *args)
    if dropout_p == 0 or _is_drawing():
        return original(*rest, **kwargs)
    with sdpa_kernel(SDPBackend.MATH) if not query.is_cpu else nullcontext():
        return _draw(original, *rest, **kwargs)


def _recurrent(original: Function, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer of torch._VF: dropout between layers."""
    is_packed = isinstance(args[3], list | tuple)
    layers, dropout, training = args[5:8] if is_packed else args[4:7]
    if not (training and dropout and layers > 1) or _is_drawing():
        return original(*args, **kwargs)
    if is_packed:
        call = forward_calls.current()
        if call is not None and call.dropout == "global" and call.batch_dims is not None:
            call.batch_dims.warn(
                "runs a recurrent layer with dropout on packed sequences: each rank draws its own "
                "masks, so the numbers are not those of one process. Leave the script without the "
                'two lines, or choose that: instep.replicate(model, dropout="rank").'
            )
        return original(*args, **kwargs)
    with torch.backends.cudnn.flags(enabled=False) if args[0].is_cuda else nullcontext():
        return _draw(original, *args, **kwargs)


PATCHES = [
    Patch(owner, name, replacement, compile="skip")
    for owner, names, replacement in (
        (torch, _FACTORIES, _draw),
        (torch, _DROPOUTS, _draw),
        (torch.Tensor, _METHODS, _draw_into),
        (nn.functional, ("scaled_dot_product_attention",), _attention),
        (VF, _RECURRENT, _recurrent),
    )
    for name in names
]
"""For replicas."""
