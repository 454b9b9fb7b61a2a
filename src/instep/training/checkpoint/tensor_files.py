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
_CHUNK = 16 << 20


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
    """The tensors of a file with this checksum, on the CPU. Raises DamagedCheckpointError."""
    content = torch.empty(path.stat().st_size, dtype=torch.uint8)
    checksum = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        view = content.numpy().data
        while view:
            read = file.readinto(view[:_CHUNK])
            if not read:
                raise DamagedCheckpointError(path, "it became shorter while it was read")
            checksum.update(view[:read])
            view = view[read:]
    if checksum.hexdigest() != sha256:
        raise DamagedCheckpointError(path, "its checksum is not that of the file that was written")
    length = int.from_bytes(content[:8].numpy().tobytes(), "little")
    header = json.loads(content[8 : 8 + length].numpy().tobytes())
    data = content[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            assert (end - start) == math.prod(shape) * dtype.itemsize
            # A copy: one tensor that is kept must not keep the memory of all.
            tensors[name] = data[start:end].clone().view(dtype).view(shape)
    return tensors


def _parts(head: bytes, ordered: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    yield memoryview(head)
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            view = flat.view(torch.uint8).numpy().data
            for start in range(0, len(view), _CHUNK):
                yield view[start : start + _CHUNK]


def _write_all(file: int, part: memoryview) -> None:
    while part:
        part = part[os.write(file, part) :]
