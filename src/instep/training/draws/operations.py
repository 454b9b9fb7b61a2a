"""The operations of torch that draw random numbers, and what decides how many each draws."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import zip_longest
from typing import Any

DRAWS_ON_CPUS = (
    *("bernoulli.out", "bernoulli_.Tensor", "bernoulli_.float", "binomial", "cauchy_"),
    *("exponential_", "geometric_", "log_normal_", "multinomial", "multinomial.out"),
    *("native_dropout", "normal_", "normal.Tensor_Tensor", "normal.Tensor_Tensor_out"),
    *("normal.Tensor_float", "normal.Tensor_float_out", "normal.float_Tensor"),
    *("normal.float_Tensor_out", "poisson", "random_", "random_.from", "random_.to"),
    *("randperm.generator_out", "rrelu_with_noise", "rrelu_with_noise.out", "rrelu_with_noise_"),
    *("uniform_", "_sample_dirichlet", "_standard_gamma"),
)
"""Those of torch.ops.aten that have a kernel for CPUs; others are made of these."""


class Draws(Enum):
    """What decides how many numbers an operation draws, and which.

    An unedited script draws what one process would draw; so this must be that of the whole batch.
    """

    SIZE = auto()
    """A size among its arguments, as in torch.rand."""
    SHAPE = auto()
    """The shape of its first tensor, as in torch.rand_like and Tensor.uniform_."""
    MASK = auto()
    """The shape of its first tensor; it returns the tensor times a mask, and the mask."""
    VALUES = auto()
    """The numbers in its tensors, as in torch.bernoulli."""


_DRAWS = {
    "rand": Draws.SIZE,
    "randn": Draws.SIZE,
    "randint": Draws.SIZE,
    "native_dropout": Draws.MASK,
}
"""By names in torch.ops.aten: of operations whose name alone misleads (see `draws_of`)."""


def draws_nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operation that may draw does not: attention, or a recurrent layer,
    without dropout, or attention's choice of a kernel."""
    if func._schema.name == "aten::_fused_sdp_choice":
        return True
    for argument, given in zip_longest(func._schema.arguments, args):
        if argument.name in ("dropout_p", "dropout"):
            value = kwargs.get(argument.name, argument.default_value) if given is None else given
            return bool(value == 0)
    return False


def draws_of(aten: str) -> Draws:
    """How an operation of torch.ops.aten draws."""
    by_name = Draws.SHAPE if aten.endswith(("_", "_like")) else Draws.VALUES
    return _DRAWS.get(aten, by_name)
