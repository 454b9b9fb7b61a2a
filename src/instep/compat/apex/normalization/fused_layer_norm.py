"""`apex.normalization.FusedLayerNorm` and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

Shape = int | Sequence[int]


class FusedLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm. `memory_efficient` changes nothing."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm with Apex's epsilon. `memory_efficient` changes nothing."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)


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


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002  # the name in Apex
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.layer_norm."""
    return functional.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def fused_layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.layer_norm without weight and bias."""
    return functional.layer_norm(input, _shape(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.rms_norm."""
    return functional.rms_norm(input, _shape(normalized_shape), weight, eps)


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch.nn.functional.rms_norm without a weight."""
    return functional.rms_norm(input, _shape(normalized_shape), eps=eps)


def _check_affine(options: dict[str, Any]) -> None:
    if not options.pop("elementwise_affine", True):
        raise RuntimeError("Without elementwise_affine there is no weight that gives the dtype.")


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else [*normalized_shape]
