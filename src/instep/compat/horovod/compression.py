"""Gradients sent in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The base class of `compression=`; any class with the same two functions will do."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and the `ctx` of `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in its own dtype again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Everything is sent as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating point is sent as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """In float16, if it is floating point; and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """In dtype `ctx`."""
        return tensor.to(ctx)


class Compression:
    """The compressors by Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
