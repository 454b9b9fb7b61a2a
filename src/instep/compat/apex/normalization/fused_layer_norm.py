"""`apex.normalization.FusedLayerNorm` and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.training.amp.casting import active_dtype, cast

Shape = int | Sequence[int]


class FusedLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm, in half precision under torch.autocast, as Apex's.

    `memory_efficient` changes nothing.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """Of any shape that ends with normalized_shape."""
        return _normalise(
            functional.layer_norm, input, self.normalized_shape, self.weight, self.bias, self.eps
        )


class FusedRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm with Apex's epsilon, in half precision under torch.autocast, as Apex's.

    `memory_efficient` changes nothing.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape that ends with normalized_shape."""
        return _normalise(functional.rms_norm, x, self.normalized_shape, self.weight, self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer normalisation whose result has the dtype of the weight, not of the input."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        _check_affine(options)
        super().__init__(normalized_shape, eps, **options)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """Of any shape that ends with normalized_shape."""
        return fused_layer_norm_affine(
            input.to(self.weight.dtype), self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS normalisation whose result has the dtype of the weight, not of the input."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        _check_affine(options)
        super().__init__(normalized_shape, eps, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape that ends with normalized_shape."""
        assert self.weight is not None
        assert self.eps is not None
        return fused_rms_norm_affine(
            x.to(self.weight.dtype), self.weight, self.normalized_shape, self.eps
        )


def _normalise(function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """The function in the dtype of torch.autocast; amp's O1 chooses by itself."""
    device = x.device.type
    if active_dtype() is not None or not torch.is_autocast_enabled(device):
        return function(x, *others)
    given = cast((x, *others), torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return function(*given)


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002  # the name in Apex
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.layer_norm."""
    return _normalise(functional.layer_norm, input, _shape(normalized_shape), weight, bias, eps)


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.layer_norm without weight and bias."""
    return _normalise(functional.layer_norm, input, _shape(normalized_shape), None, None, eps)


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.rms_norm."""
    return _normalise(functional.rms_norm, input, _shape(normalized_shape), weight, eps)


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.rms_norm without a weight."""
    return _normalise(functional.rms_norm, input, _shape(normalized_shape), None, eps)


def _check_affine(options: dict[str, Any]) -> None:
    if not options.pop("elementwise_affine", True):
        raise RuntimeError("Without elementwise_affine there is no weight that gives the dtype.")


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else [*normalized_shape]
