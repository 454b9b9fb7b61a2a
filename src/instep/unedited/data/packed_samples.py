"""Samples packed to be sent: a pickle, and one tensor with the memory of tensors and arrays."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.storage import TypedStorage

from instep.distributed.communication.tensors import is_dense
from instep.process.torch_private.dispatch import DisableTorchFunctionSubclass
from instep.process.torch_private.tensors import typed_storage, untyped_storage_of

_ALIGNMENT = 64  # bytes; enough for every dtype
_PROTOCOL = 5


class CannotPackError(Exception):
    """A value that cannot be sent to another process, or is not the same there."""


@dataclass(frozen=True)
class PackedSamples:
    """A packed value."""

    pickled: bytes
    memory: Tensor
    """The bytes of the tensors and arrays; a multiple of the alignment."""

    def checksum(self) -> bytes:
        """Equal for equal values."""
        hasher = blake2b(self.pickled, digest_size=16)
        hasher.update(self.memory.numpy().data)
        return hasher.digest()


def pack(value: object) -> PackedSamples:
    """Pack a value.

    Dense CPU tensors and numeric arrays are copied with their strides; the rest is pickled.
    Raises CannotPackError for what does not pickle, is on another device or requires a gradient.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except CannotPackError:
        raise
    except Exception as error:  # raised by the value's own code
        raise CannotPackError(f"it does not pickle: {error}") from error
    memory = np.zeros(pickler.size, dtype=np.uint8)  # zeros in the padding too, for the checksum
    for start, array in pickler.arrays:
        memory[start : start + array.size] = array
    return PackedSamples(file.getvalue(), torch.from_numpy(memory))


def unpack(packed: PackedSamples) -> Any:
    """The value; its tensors and arrays are disjoint parts of the packed memory."""
    return _Unpickler(packed).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.arrays: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.size = 0

    def persistent_id(self, value: object) -> object:
        """What the pickle has in place of a tensor or an array; None: pickle the value itself."""
        if isinstance(value, Tensor):
            _check_tensor(value)
            if type(value) is Tensor and _is_strided(value):
                dense = _dense(value)
                flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
                return "tensor", self._add(flat), dense.dtype, tuple(dense.shape), dense.stride()
        if isinstance(value, TypedStorage | UntypedStorage):  # torch pickles its address, too
            flat = torch.tensor([], dtype=torch.uint8).set_(untyped_storage_of(value)).numpy()
            dtype = value.dtype if isinstance(value, TypedStorage) else None
            return "storage", self._add(flat), dtype, (flat.size,), None
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.flags.c_contiguous:
            flat = value.reshape(-1).view(np.uint8)
            return "array", self._add(flat), value.dtype, value.shape, None
        return None

    def reducer_override(self, value: object) -> Any:
        """How a tensor of a subclass is pickled: its elements as those of a plain one."""
        if not (isinstance(value, Tensor) and _is_plain_in_memory(value)):
            return NotImplemented
        rebuild, (_, type_, _, state) = value.__reduce_ex__(_PROTOCOL)
        with DisableTorchFunctionSubclass():
            plain = value.as_subclass(Tensor)
        return rebuild, (_identity, type_, (plain,), state)

    def _add(self, flat: np.ndarray[Any, Any]) -> int:
        start = self.size
        self.arrays.append((start, flat))
        self.size += -(-flat.size // _ALIGNMENT) * _ALIGNMENT
        return start


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: PackedSamples) -> None:
        super().__init__(io.BytesIO(packed.pickled))
        self._memory = packed.memory.numpy().data

    def persistent_load(self, pid: Any) -> object:
        """The tensor or array for an id of `_Pickler.persistent_id`."""
        type_, start, dtype, shape, stride = pid
        count = prod(shape)
        if type_ == "array":
            return np.frombuffer(self._memory, dtype, count, start).reshape(shape)
        if type_ == "storage":
            return self._storage(start, count, dtype)
        if count == 0:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        # Not as_strided: a view has a base (`_base`), which the script's tensor does not have.
        return flat.set_(flat.untyped_storage(), 0, shape, stride)

    def _storage(self, start: int, count: int, dtype: torch.dtype | None) -> object:
        storage = UntypedStorage(0)
        if count:
            flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=start)
            storage = flat.untyped_storage()
        return storage if dtype is None else typed_storage(storage, dtype)


def _identity(value: Any) -> Any:
    return value


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _is_plain_in_memory(tensor: Tensor) -> bool:
    """Whether all that its class adds to a plain tensor are attributes and functions."""
    cls = type(tensor)
    return (
        cls is not Tensor
        and cls.__reduce_ex__ is Tensor.__reduce_ex__
        and cls.__torch_dispatch__ is Tensor.__torch_dispatch__
        and _is_strided(tensor)
    )


def _check_tensor(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise CannotPackError(f"it holds a tensor on {tensor.device}")
    if tensor.requires_grad:
        raise CannotPackError("it holds a tensor that requires a gradient")


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if there are gaps between its elements."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_dense(tensor) else tensor.contiguous()
