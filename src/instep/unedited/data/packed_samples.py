"""Samples as they travel: a pickle, and beside it one tensor with the memory of all tensors and
arrays in them.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; enough for every dtype


class CannotPackError(Exception):
    """A value that is not the same in another process, or does not get there."""


@dataclass(frozen=True)
class PackedSamples:
    """A packed value."""

    pickled: bytes
    memory: Tensor
    """What the tensors and arrays hold; its length is a multiple of the alignment."""

    def digest(self) -> bytes:
        """Equal for equal values."""
        known = blake2b(self.pickled, digest_size=16)
        known.update(self.memory.numpy().data)
        return known.digest()


def pack(value: object) -> PackedSamples:
    """A value ready to travel.

    Dense CPU tensors and numeric arrays are copied as they lie, strides and all; the rest is
    pickled. Raises CannotPackError for what does not pickle, lies on another device or requires
    a gradient.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    try:
        packer.dump(value)
    except CannotPackError:
        raise
    except Exception as why:  # whatever the value's own code raises
        raise CannotPackError(f"it does not pickle: {why}") from why
    memory = np.zeros(packer.size, dtype=np.uint8)  # the padding too: digests see it
    for start, piece in packer.pieces:
        memory[start : start + piece.size] = piece
    return PackedSamples(file.getvalue(), torch.from_numpy(memory))


def unpack(packed: PackedSamples) -> Any:
    """The value again; its tensors and arrays lie in the packed's memory, each in a part of it."""
    return _Unpacker(packed).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.pieces: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.size = 0

    def persistent_id(self, value: object) -> object:
        """What stands in the pickle for a tensor or an array; None: the thing itself."""
        if isinstance(value, Tensor):
            _check_plain_data(value)
            if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
                dense = _dense(value)
                flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
                return "tensor", self._put(flat), dense.dtype, tuple(dense.shape), dense.stride()
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.flags.c_contiguous:
            flat = value.reshape(-1).view(np.uint8)
            return "array", self._put(flat), value.dtype, value.shape, None
        return None

    def _put(self, flat: np.ndarray[Any, Any]) -> int:
        start = self.size
        self.pieces.append((start, flat))
        self.size += -(-flat.size // _ALIGNMENT) * _ALIGNMENT
        return start


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: PackedSamples) -> None:
        super().__init__(io.BytesIO(packed.pickled))
        self._memory = packed.memory.numpy().data

    def persistent_load(self, place: Any) -> object:
        """The tensor or array that the pickle has a place for."""
        kind, start, dtype, shape, stride = place
        count = prod(shape)
        if kind == "array":
            return np.frombuffer(self._memory, dtype, count, start).reshape(shape)
        if count == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        # A view would share its version counter with nothing that anybody sees, but have a base.
        return flat.set_(flat.untyped_storage(), 0, shape, stride)


def _check_plain_data(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise CannotPackError(f"it holds a tensor on {tensor.device}")
    if tensor.requires_grad:
        raise CannotPackError("it holds a tensor that requires a gradient")


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where there are gaps between its elements."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride():
        return tensor
    return tensor.contiguous()
