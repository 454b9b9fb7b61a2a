"""What is known of each data set of the script, and what is said of it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Subset
from torch.utils.weak import WeakIdKeyDictionary

from instep.distributed.communication.transport import get_transport
from instep.process import print_line
from instep.process.process_value import ProcessValue
from instep.unedited.data.dataset_state import Variable
from instep.unedited.data.exchange_policy import ExchangePolicy
from instep.unedited.data.sample_loading import SampleEffects
from instep.unedited.data.workers.worker_batches import WorkerLoading


@dataclass
class KnownDataset:
    """What is known of a data set, whichever loaders read it: many scripts make a new loader for
    each pass."""

    policies: dict[tuple[int, int | None], ExchangePolicy] = field(default_factory=dict)
    """By the number of workers and the size of batches."""
    passes: int = 0
    generator: str | None = None
    """Where it holds a random generator."""
    variables: list[Variable] = field(default_factory=list)
    """The global variables that its functions name."""
    effects: SampleEffects = field(default_factory=SampleEffects)
    has_warned: bool = False
    worker_loading: WorkerLoading = field(default_factory=WorkerLoading)


_known = WeakIdKeyDictionary()
_has_mentioned_draws = ProcessValue(False)


def all_known() -> list[KnownDataset]:
    """What is known of every data set."""
    return list(_known.values())


def known_dataset(loader: DataLoader[Any]) -> KnownDataset:
    """What is known of the loader's data set."""
    key: Any = loader.dataset
    try:
        weakref.ref(key)
    except TypeError:
        key = loader
    known: KnownDataset = _known.setdefault(key, KnownDataset())
    return known


def warn_of(loader: DataLoader[Any], line: str) -> None:
    """Print a line on rank 0, once for each data set."""
    known = known_dataset(loader)
    if not known.has_warned and get_transport().rank == 0:
        name = _class_name(loader.dataset)
        print_line(f"data set {name}: {line} [INS713]")
    known.has_warned = True


def announce_draws(dataset: object) -> None:
    """Print a line on rank 0, once in a job."""
    if not _has_mentioned_draws.value and get_transport().rank == 0:
        name = _class_name(dataset)
        print_line(
            f"{name} draws random numbers in its samples. They are the same for every N, but not "
            "those of plain Python (--load whole keeps those)."
        )
    _has_mentioned_draws.value = True


def _class_name(dataset: object) -> str:
    """The class of the script's own data set, also where random_split has made a part of it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset).__name__
