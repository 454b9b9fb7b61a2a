"""Whether all ranks have the same data: its length, its indices, and some of its values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sized
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from instep.distributed.communication.transport import get_transport
from instep.distributed.errors import DisagreementError
from instep.distributed.rendezvous.bootstrap import is_world_of_one, store
from instep.process.exit_status import group_ranks
from instep.training.blocks import batch_leaves
from instep.training.errors import CannotShardError

_ADVICE = (
    "Of different data, rows would be left out and others seen twice. Divide or shuffle a data set "
    "by a seed that is the same on all ranks, sort lists of files, and leave all division by rank "
    "to instep.shard."
)
_MAX_ENTRIES = 32
"""So many entries of what has one for each sample are compared, the first and the last included."""
_MAX_NUMBERS = 4096
_TOLERANCE = 1e-2
"""Processors that round differently compute the same data set up to this."""

Entry = str | float


def check_same_data(loader: Any) -> None:
    """Raise DisagreementError on all ranks unless their loaders have the same data, as far as this
    shows without loading a sample, and CannotShardError if a sampler divides it.

    Collective.
    """
    samplers = _samplers(loader)
    for each in samplers:
        if getattr(each, "num_replicas", 1) > 1:
            name = type(each).__name__
            raise CannotShardError(
                f"the loader's {name} divides the data among the ranks, and instep.shard would "
                "divide each rank's part again. Leave the sampler out: "
                "instep.shard(DataLoader(dataset, batch_size, shuffle=True))."
            )
    own = dict(_of_data(loader.dataset))
    for each in samplers:
        own.update(_of_sampler(each))
    gathered = get_transport().all_gather_object(own)
    for name in gathered[0]:
        seen = [each[name] for each in gathered if name in each]
        if len(seen) == len(gathered) and not all(_is_same(each, seen[0]) for each in seen):
            raise DisagreementError(name, group_ranks([_show(each) for each in seen]), _ADVICE)


class FirstBatchCheck:
    """Compares the first batch of a loader of whole batches with rank 0's, and waits for no rank.

    A data set that itself divides the data by rank, or that draws them otherwise on each, is seen
    by that.
    """

    def __init__(self, key: str) -> None:
        """`key`: the same on all ranks for this loader at its position, and for no other."""
        self._key = f"first batch {key}"
        self._own: list[Entry] | None = None
        self._is_done = is_world_of_one() or get_transport().size == 1

    def compare(self, batch: Any, kind: str) -> None:
        """To be called with each batch, and with None at the end. `kind`: of the data, in words.

        Raises CannotShardError on another rank than 0 whose first batch differs.
        """
        if self._is_done:
            return
        if self._own is None:
            self._own = [entry for leaf in batch_leaves(batch) for entry in _of_leaf(leaf)]
            if get_transport().rank == 0:
                store().set(self._key, json.dumps(self._own))
        self._is_done = get_transport().rank == 0
        if not self._is_done and store().check([self._key]):
            self._is_done = True
            if not _is_same(self._own, json.loads(store().get(self._key))):
                raise CannotShardError(
                    f"the first batch of this loader is not the same on this rank as on rank 0: "
                    f"the {kind} divides the data among the ranks, or draws or orders them "
                    "otherwise on each, and instep.shard would divide each rank's part again. Let "
                    "it yield all samples, in the same order on every rank (no RANK, no "
                    "torch.distributed.get_rank)."
                )


def _of_leaf(leaf: Any) -> list[Entry]:
    """The shape, and something of each of some rows."""
    shape = getattr(leaf, "shape", ())
    return [str(tuple(shape)), *(_entries(leaf) if shape else [_entry(leaf)])]


def _samplers(loader: Any) -> list[Any]:
    batches = loader.batch_sampler
    found = [batches, getattr(batches, "sampler", None), loader.sampler]
    return list({id(each): each for each in found if each is not None}.values())


def _of_sampler(sampler: Any) -> Iterator[tuple[str, list[Entry]]]:
    name = type(sampler).__name__
    for part in ("indices", "weights"):
        yield f"{name}.{part}", _entries(getattr(sampler, part, None))
    yield f"the entries of the loader's {name}", _entries(sampler)


def _of_data(
    data: Any, name: str = "", outer: tuple[Any, ...] = ()
) -> Iterator[tuple[str, list[Entry]]]:
    """What a data set, and those inside of it, have for each sample."""
    name, length = name + type(data).__name__, _length(data)
    if not length or any(data is each for each in outer):
        return
    yield f"the length of the {name}", [str(length)]
    yield f"the samples of the {name}", _entries(data)
    for attribute, value in vars(data).items() if isinstance(data, Dataset) else ():
        if _length(value) == length:
            yield f"{name}.{attribute}", _entries(value)
        is_short = isinstance(value, list | tuple) and len(value) <= _MAX_ENTRIES
        for number, part in enumerate(value if is_short else [value]):
            if isinstance(part, Dataset):
                inside = f"{name}.{attribute}[{number}]: " if is_short else f"{name}.{attribute}: "
                yield from _of_data(part, inside, (*outer, data))
            elif is_short and isinstance(part, Tensor) and _length(part) == length:
                yield f"{name}.{attribute}[{number}]", _entries(part)


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        is_plain = value.dim() and value.layout is torch.strided and not value.is_meta
        return len(value) if is_plain else None
    try:
        return len(value) if isinstance(value, Sized) and not isinstance(value, str) else None
    except (TypeError, NotImplementedError):  # as of arrays without dimensions
        return None


def _entries(values: Any) -> list[Entry]:
    """Some of the entries of a list, an array or a tensor; none of anything else."""
    if not isinstance(values, list | tuple | range | np.ndarray | Tensor) or not _length(values):
        return []
    count = len(values)
    picked = np.linspace(0, count - 1, min(count, _MAX_ENTRIES)).astype(int).tolist()
    return [_entry(values[k]) for k in picked]


def _entry(value: Any) -> Entry:
    """A text or a number that is the same for the same sample, wherever its files lie."""
    if isinstance(value, str | PurePath):
        return PurePath(value).name
    if isinstance(value, bool | int | np.integer | np.bool_):
        return str(int(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value.ravel()[:_MAX_NUMBERS].astype(np.float64))
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        return float(value.detach().flatten()[:_MAX_NUMBERS].abs().double().mean())
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, list | tuple) and len(value) <= _MAX_ENTRIES:
        return " ".join(each for each in map(_entry, value) if isinstance(each, str))
    return ""


def _is_same(some: list[Entry], others: list[Entry]) -> bool:
    return len(some) == len(others) and all(map(_is_close, some, others))


def _is_close(one: Entry, other: Entry) -> bool:
    if isinstance(one, str) or isinstance(other, str) or not math.isfinite(one):
        return repr(one) == repr(other)
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-6)


def _show(values: list[Entry]) -> str:
    if len(values) == 1:
        return str(values[0])
    shown = [each if isinstance(each, str) else f"{each:.4g}" for each in values[:4]]
    return f"[{', '.join(shown)}, …]"
