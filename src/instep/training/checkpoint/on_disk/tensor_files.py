"""Tensors in a file of the safetensors format, which needs no unpickling and any framework reads.

The format: 8 bytes with the length of a JSON header, the header (each tensor's dtype, shape and
first and last byte), and the tensors' bytes one after another. It is written here and not by the
library of that name, because a checksum is taken of the bytes on their way to the disk, and no
second copy of all tensors is made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.training.checkpoint.errors import DamagedCheckpointError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_CHUNK = 1 << 20
"""Bytes that are still in the processor's cache when they are written, after the checksum. (With 16
MiB a write beside a training took twice the processor's time.)"""


def is_supported(tensor: Tensor) -> bool:
    """Whether the format has this tensor's dtype and layout."""
    return (
        tensor.layout is torch.strided and tensor.dtype in _DTYPE_NAMES and not tensor.is_quantized
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a new file and wait until it is on the disk; returns its SHA-256. Raises OSError."""
    # The widest come first, so that each begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for part in _parts(len(text).to_bytes(8, "little") + text, ordered):
            checksum.update(part)
            _write_all(file.fileno(), part)
        os.fsync(file.fileno())
    return checksum.hexdigest()


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file with this checksum, on the CPU. Raises DamagedCheckpointError.

    The bytes are read once, into the memory of the tensors, and the checksum is taken on the way.
    """
    tensors = {}
    with _FileReader(path) as file:
        for name, dtype, shape in _layout(file):
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            if tensors[name].numel():
                file.read_into(_bytes_of(tensors[name]))
        file.verify(sha256)
    return tensors


def verify_file(path: Path, sha256: str) -> None:
    """Read a file and keep nothing. Raises DamagedCheckpointError if its checksum is another."""
    memory = memoryview(bytearray(_CHUNK))
    with _FileReader(path) as file:
        while file.left:
            file.read_into(memory[: file.left])
        file.verify(sha256)


class _FileReader:
    """A file whose bytes are read in their order; `left`: how many there still are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by __exit__
        self.left = os.fstat(self._file.fileno()).st_size
        self._checksum = hashlib.sha256()

    def __enter__(self) -> _FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, memory: memoryview) -> None:
        """Fill `memory` with the next bytes."""
        while memory:
            read = self._file.readinto(memory[:_CHUNK])
            if not read:
                raise DamagedCheckpointError(self.path, "it became shorter while it was read")
            self._checksum.update(memory[:read])
            memory = memory[read:]
            self.left -= read

    def read(self, count: int) -> bytes:
        """The next bytes; ValueError if there are fewer."""
        if count > self.left:
            raise ValueError(f"{count} bytes of {self.left}")
        content = bytearray(count)
        self.read_into(memoryview(content))
        return bytes(content)

    def verify(self, sha256: str) -> None:
        """Raise DamagedCheckpointError if what was read has another checksum, or is not all."""
        if self.left or self._checksum.hexdigest() != sha256:
            raise DamagedCheckpointError(
                self.path, "its checksum is not that of the file that was written"
            )


def _layout(file: _FileReader) -> list[tuple[str, torch.dtype, list[int]]]:
    """Each tensor's name, dtype and shape, in the order of their bytes, from a file's header.

    The header is used before its checksum is known, so nothing in it is believed: the tensors take
    exactly the memory that the file has bytes. Raises DamagedCheckpointError.
    """
    try:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        layout, end = [], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            start, size = end, math.prod(shape) * dtype.itemsize
            end += size
            natural = all(type(n) is int and n >= 0 for n in shape)
            if entry["data_offsets"] != [start, end] or not natural:
                raise ValueError(f"{name} has {size} bytes, and not {entry['data_offsets']}")
            layout.append((name, dtype, shape))
        if end != file.left:
            raise ValueError(f"the tensors have {end} bytes of {file.left}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCheckpointError(file.path, f"its header is not one ({error})") from error
    return layout


def _parts(head: bytes, ordered: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    yield memoryview(head)
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            view = _bytes_of(flat)
            for start in range(0, len(view), _CHUNK):
                yield view[start : start + _CHUNK]


def _write_all(file: int, part: memoryview) -> None:
    while part:
        part = part[os.write(file, part) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor that is not empty."""
    return tensor.view(-1).view(torch.uint8).numpy().data
