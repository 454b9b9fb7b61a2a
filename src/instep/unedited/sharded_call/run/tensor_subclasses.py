"""Tensors of a class with a `__torch_function__` of its own, such as monai's MetaTensor.

They carry attributes, which the class's functions hand on. A message between ranks has only
their elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.process.torch_private.dispatch import DisableTorchFunctionSubclass
from instep.training.pytree import flatten


def is_subclass(value: Any) -> bool:
    """Whether this is a tensor of a class that carries attributes, and computes as torch does."""
    cls = type(value)
    return (
        cls is not Tensor
        and isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def as_plain(value: Any) -> Any:
    """A tensor without class and attributes, differentiable; other values as they are."""
    if not is_subclass(value):
        return value
    with DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def with_attributes_of(like: Tensor, plain: Tensor) -> Tensor:
    """The elements of `plain` with the class and the attributes of `like`; differentiable."""
    with DisableTorchFunctionSubclass():
        tensor = plain.as_subclass(type(like))
    tensor.__dict__.update(like.__dict__)
    return tensor


def has_attributes_of(like: Tensor, tensor: Tensor) -> bool:
    """Whether both have the same class and equal attributes."""
    (mine, structure), (theirs, expected) = flatten(vars(tensor)), flatten(vars(like))
    return type(tensor) is type(like) and structure == expected and all(map(is_equal, mine, theirs))


def is_equal(left: Any, right: Any) -> bool:
    """Whether two values are equal; not if nobody can say."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(as_plain(left), as_plain(right))
    equal = left is right or left == right
    return equal if isinstance(equal, bool) else bool(np.all(equal))
