"""The schema of samples, and the batch that torch's default_collate makes of samples of a schema.

If all samples of a batch have one schema, its rows collated on each rank and then joined are the
collated batch, bit for bit: every tensor, array and number becomes a tensor of rows, every text an
entry of a list. (Otherwise default_collate promotes types or fails, and a part does not show that.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SampleSchema = tuple[Any, ...]
"""Types, dtypes, shapes and keys, comparable: (type, ...) of a leaf, (type, keys, schemas) else."""

_NUMBERS = (int, float, bool)
_TEXTS = (str, bytes)
_CONTAINERS = (tuple, list, dict)


def common_schema(samples: Sequence[object]) -> SampleSchema | None:
    """The schema of all of these samples; None if they differ or have none."""
    if not samples:
        return None
    schema = schema_of(samples[0])
    if schema is None or any(schema_of(sample) != schema for sample in samples[1:]):
        return None
    return schema


def schema_of(sample: object) -> SampleSchema | None:
    """The schema of plain tensors, arrays, numbers and texts in tuples, lists and dicts.

    None for anything else, which default_collate may treat in ways that are not known here.
    """
    type_ = type(sample)
    if type_ in _NUMBERS or type_ in _TEXTS:
        return (type_,)
    if isinstance(sample, Tensor):
        plain = type_ is Tensor and sample.layout is torch.strided and sample.device.type == "cpu"
        simple = plain and not (sample.requires_grad or sample.is_quantized or sample.is_nested)
        return (type_, sample.dtype, tuple(sample.shape)) if simple else None
    if isinstance(sample, np.ndarray):
        simple = type_ is np.ndarray and sample.dtype.kind in "biuf"
        return (type_, sample.dtype.str, sample.shape) if simple else None
    if isinstance(sample, np.generic):
        return (type_,) if sample.dtype.kind in "biuf" else None
    if isinstance(sample, dict):
        simple = type_ is dict and all(type(key) in (str, int) for key in sample)
        return _nested_schema(type_, tuple(sample), sample.values()) if simple else None
    if type_ in (tuple, list):
        assert isinstance(sample, tuple | list)
        return _nested_schema(type_, (), sample)
    return None


def _nested_schema(
    type_: type, keys: tuple[Any, ...], children: Iterable[object]
) -> SampleSchema | None:
    schemas = tuple(schema_of(child) for child in children)
    return None if None in schemas else (type_, keys, schemas)


def flatten_collated(schema: SampleSchema, collated: Any) -> Iterator[Any]:
    """The leaves of a collated batch of samples of this schema, in order."""
    if schema[0] not in _CONTAINERS:
        yield collated
        return
    parts = (collated[key] for key in schema[1]) if schema[0] is dict else collated
    for child, part in zip(schema[2], parts, strict=True):
        yield from flatten_collated(child, part)


def unflatten_collated(schema: SampleSchema, leaves: Iterator[Any]) -> Any:
    """The collated batch of samples of this schema, from its leaves."""
    if schema[0] not in _CONTAINERS:
        return next(leaves)
    children = [unflatten_collated(child, leaves) for child in schema[2]]
    return dict(zip(schema[1], children, strict=True)) if schema[0] is dict else children


def extract_sample(schema: SampleSchema, leaves: Iterator[Any], row: int) -> Any:
    """The sample that is this row of the leaves."""
    type_ = schema[0]
    if type_ in _CONTAINERS:
        children = [extract_sample(child, leaves, row) for child in schema[2]]
        return dict(zip(schema[1], children, strict=True)) if type_ is dict else type_(children)
    entry = next(leaves)[row]
    if type_ in _TEXTS:
        return entry
    if type_ is Tensor:
        return entry.clone()
    return entry.numpy().copy() if type_ is np.ndarray else type_(entry.item())
