"""Layers of several shards that share a product: linear layers and convolutions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from instep.process.patching import Function


class WeightedLayer(Hashable, Protocol):
    """A function of a batch and a weight (out, in, ...). Hashable, and can be pickled.

    Inputs are (rows, in, ...), outputs and their gradients (rows, out, ...), all contiguous.
    """

    def output(
        self, original: Function, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The outputs, from torch's function."""

    def output_numel(self, inputs: Tensor, weight: Tensor) -> int:
        """How many elements the outputs have."""

    def input_grad(self, grads: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the inputs, from that of the outputs."""

    def weight_grad(self, grads: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the weight, of which only the shape counts."""

    def bias_grad(self, grads: Tensor) -> Tensor:
        """The gradient of the bias."""

    def write_weight_grad(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        """Overwrite `out`, contiguous, with the gradient of a weight of its shape."""


@dataclass(frozen=True)
class Linear:
    """torch.nn.functional.linear of rows (rows, in)."""

    def output(
        self, original: Function, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        output: Tensor = original(inputs, weight, bias)
        return output

    def output_numel(self, inputs: Tensor, weight: Tensor) -> int:
        return len(inputs) * len(weight)

    def input_grad(self, grads: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return grads @ weight

    def weight_grad(self, grads: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return grads.t() @ inputs

    def bias_grad(self, grads: Tensor) -> Tensor:
        return grads.sum(0)

    def write_weight_grad(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        torch.mm(grads.t(), inputs, out=out)


@dataclass(frozen=True)
class Convolution:
    """torch.nn.functional.conv1d to conv3d without groups, of a batch (rows, in, ...)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, dims: int, options: Sequence[Any]) -> Convolution | None:
        """The convolution with `options` (stride, padding, dilation, groups) over so many
        dimensions; None if it has groups, or a padding with a name."""
        *sizes, groups = options
        if groups != 1 or isinstance(options[1], str):
            return None
        of_dims = [tuple(x) * (dims // len(x)) for x in map(_as_tuple, sizes)]
        return cls(*of_dims)

    def output(
        self, original: Function, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        output: Tensor = original(inputs, weight, bias, self.stride, self.padding, self.dilation)
        return output

    def output_numel(self, inputs: Tensor, weight: Tensor) -> int:
        sizes = zip(
            *(inputs.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation),
            strict=True,
        )
        places = [
            (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for length, kernel, stride, padding, dilation in sizes
        ]
        return len(inputs) * len(weight) * prod(places)

    def input_grad(self, grads: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grads, inputs, weight, is_weight=False)

    def weight_grad(self, grads: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grads, inputs, weight, is_weight=True)

    def bias_grad(self, grads: Tensor) -> Tensor:
        return grads.sum((0, *range(2, grads.dim())))

    def write_weight_grad(self, grads: Tensor, inputs: Tensor, out: Tensor) -> None:
        out.copy_(self.weight_grad(grads.contiguous(), inputs, out))

    def _backward(
        self, grads: Tensor, inputs: Tensor, weight: Tensor, *, is_weight: bool
    ) -> Tensor:
        output_padding = [0] * len(self.stride)
        options = (self.stride, self.padding, self.dilation, False, output_padding, 1)
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grads, inputs, weight, None, *options, [not is_weight, is_weight, False]
        )
        return found[is_weight]


def _as_tuple(size: Any) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)
