"""What a sample is made of, and what torch's default_collate makes of samples that are alike.

Where all samples of a batch are of one kind, its collated parts put together are the collated
batch, bit for bit: every tensor, array and number becomes a tensor of rows, every text an entry of
a list. (Where they are not, collating promotes or fails in ways that a part does not show.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SampleSchema = tuple[Any, ...]
"""What two samples have in common that are alike: types, dtypes, shapes, keys. Comparable."""

_NUMBERS = (int, float, bool)
_TEXTS = (str, bytes)


def common_schema(samples: Sequence[object]) -> SampleSchema | None:
    """The kind of all of these samples; None where they differ, or where default_collate knows
    more about them than is known here.
    """
    if not samples:
        return None
    kind = schema_of(samples[0])
    if kind is None or any(schema_of(sample) != kind for sample in samples[1:]):
        return None
    return kind


def schema_of(sample: object) -> SampleSchema | None:
    """What a sample is made of: plain tensors, arrays, numbers, texts in tuples, lists, dicts."""
    what = type(sample)
    if what in _NUMBERS or what in _TEXTS:
        return (what,)
    if isinstance(sample, Tensor):
        plain = what is Tensor and sample.layout is torch.strided and sample.device.type == "cpu"
        simple = plain and not (sample.requires_grad or sample.is_quantized or sample.is_nested)
        return (what, sample.dtype, tuple(sample.shape)) if simple else None
    if isinstance(sample, np.ndarray):
        simple = what is np.ndarray and sample.dtype.kind in "biuf"
        return (what, sample.dtype.str, sample.shape) if simple else None
    if isinstance(sample, np.generic):
        return (what,) if sample.dtype.kind in "biuf" else None
    if isinstance(sample, dict):
        simple = what is dict and all(type(key) in (str, int) for key in sample)
        return _nested(what, tuple(sample), sample.values()) if simple else None
    if what in (tuple, list):
        assert isinstance(sample, tuple | list)
        return _nested(what, (), sample)
    return None


def _nested(what: type, keys: tuple[Any, ...], children: Iterable[object]) -> SampleSchema | None:
    kinds = tuple(schema_of(child) for child in children)
    return None if None in kinds else (what, keys, kinds)


def flatten_collated(kind: SampleSchema, collated: Any) -> Iterator[Any]:
    """What default_collate made of each leaf of samples of this kind, in order."""
    if kind[0] in (tuple, list):
        for child, part in zip(kind[2], collated, strict=True):
            yield from flatten_collated(child, part)
    elif kind[0] is dict:
        for key, child in zip(kind[1], kind[2], strict=True):
            yield from flatten_collated(child, collated[key])
    else:
        yield collated


def unflatten_collated(kind: SampleSchema, leaves: Iterator[Any]) -> Any:
    """What default_collate makes of samples of this kind, from its leaves."""
    if kind[0] in (tuple, list):
        return [unflatten_collated(child, leaves) for child in kind[2]]
    if kind[0] is dict:
        return {
            key: unflatten_collated(child, leaves)
            for key, child in zip(kind[1], kind[2], strict=True)
        }
    return next(leaves)


def extract_sample(kind: SampleSchema, leaves: Iterator[Any], row: int) -> Any:
    """The sample that became this row of the leaves."""
    what = kind[0]
    if what in (tuple, list):
        return what(extract_sample(child, leaves, row) for child in kind[2])
    if what is dict:
        return {
            key: extract_sample(child, leaves, row)
            for key, child in zip(kind[1], kind[2], strict=True)
        }
    entry = next(leaves)[row]
    if what in _TEXTS:
        return entry
    if what is Tensor:
        return entry.clone()
    return entry.numpy().copy() if what is np.ndarray else what(entry.item())
