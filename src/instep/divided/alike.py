"""Do all ranks of an unedited script make the same call? They do unless the script takes numbers
from the clock, from a process id or from another source that no seed reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from instep.communication.transport import Transport
from instep.divided.rows import Rows


def told_apart(module: nn.Module, leaves: Sequence[Any], way: Transport) -> str | None:
    """What is not the same on all ranks, in words; None if all is. Collective.

    Args:
        leaves: the arguments of the call.
    """
    parts = {
        "its parameters are": [*module.parameters(), *module.buffers()],
        "it is called with arguments that are": leaves,
    }
    digests = torch.tensor([_digest(values) for values in parts.values()])
    by_rank = way.all_gather(digests)
    for k, what in enumerate(parts):
        others = [rank for rank, theirs in enumerate(by_rank) if theirs[k] != by_rank[0][k]]
        if others:
            return (
                f"{what} not the same on rank {others[0]} as on rank 0 "
                "(a seed from the clock, or another thing that differs between processes?)"
            )
    return None


def _digest(values: Iterable[Any]) -> int:
    """Of the bits of tensors and of plain numbers; what stays on its ranks has no copies."""
    digest = 0
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, Rows):
            digest = crc32(_bits(value), digest)
        elif isinstance(value, bool | int | float | str):
            digest = crc32(repr(value).encode(), digest)
    return digest


def _bits(tensor: Tensor) -> Any:
    """Its bytes, as a buffer; none of a sparse or a quantized one."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
