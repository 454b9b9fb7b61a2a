"""What a rank says that it is doing: the same words on every rank, or an error on all of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch

TAG_BITS = 24


@dataclass(frozen=True)
class Call:
    """One collective, as far as the ranks must agree about it."""

    text: str
    """For people: "all_reduce(SUM, float32, 1024 elements)"."""
    tag: int
    """For machines: a hash of the text in TAG_BITS bits, the same in every process."""


@lru_cache(maxsize=4096)
def call(
    kind: str,
    dtype: torch.dtype | None = None,
    numel: int = 0,
    op: str = "",
    root: int | None = None,
) -> Call:
    """The call `kind`; `numel` is the number of elements that each rank puts in."""
    words = [op] if op else []
    if dtype is not None:
        words += [str(dtype).removeprefix("torch."), f"{numel} element{'s' * (numel != 1)}"]
    if root is not None:
        words.append(f"root {root}")
    text = f"{kind}({', '.join(words)})" if words else kind
    return Call(text, zlib.crc32(text.encode()) & ((1 << TAG_BITS) - 1))
