"""Under `--bitwise`, instep's own functions as a script sees them: those of one process.

A script with the two lines is then divided as one without them: every rank runs it with whole
batches, its calls of modules are divided, and it never learns of other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from instep.distributed.communication.scopes import Here, Scope
from instep.distributed.rendezvous.bootstrap import world_of_one
from instep.process import settings
from instep.process.patching import Function, patches
from instep.training.errors import BitwiseError

_REFUSED = {
    "Checkpoint": "`instep run --checkpoint FOLDER` saves and resumes it",
    "Group": "there are no groups of ranks",
    "group": "there are no groups of ranks",
    "spawn": "`instep run` starts the ranks",
}
_SOURCE = "--bitwise"


def replicate(
    model: Any,
    *,
    batch_statistics: str = "global",
    dropout: str = "global",
    compression: object = None,
    bitwise: int | None = None,
) -> Any:
    """The model itself. Raises BitwiseError for options with other numbers."""
    if (batch_statistics, dropout, compression) != ("global", "global", None):
        raise BitwiseError(
            f"--bitwise {settings.BITWISE} gives the numbers of the whole batch: leave "
            "batch_statistics, dropout and compression out of instep.replicate."
        )
    _check_shards(bitwise)
    return model


def shard(what: Any, *, bitwise: int | None = None) -> Any:
    """The loader, batch or optimizer itself; a loader gets the attribute `total_len`."""
    _check_shards(bitwise)
    if isinstance(what, DataLoader) and hasattr(what.dataset, "__len__"):
        what.total_len = len(what.dataset)
    return what


def _check_shards(asked: int | None) -> None:
    shards = int(settings.BITWISE)
    if asked not in (None, shards):
        raise BitwiseError(
            f"the script asks for bitwise={asked}, and it was started with --bitwise {shards}."
        )


def _weight(count: object) -> None:
    """For `instep.weight`: the loss divides by the whole batch's denominator already."""


def _on_main_process(function: Function) -> Function:
    return function


class ScopeOfOne(Scope):
    """A `single_process_scope` whose code just runs."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)

    def __enter__(self) -> Here:
        with world_of_one(_SOURCE):
            return super().__enter__()


_ANSWERS: dict[str, Callable[..., Any]] = {
    "no_sync": nullcontext,
    "on_main_process": _on_main_process,
    "replicate": replicate,
    "shard": shard,
    "single_process_scope": ScopeOfOne,
    "weight": _weight,
}


def _instep_getattr(original: Function, name: str) -> Any:
    """For `instep.replicate`, `instep.rank` and so on."""
    if name in _REFUSED:
        return functools.partial(_refuse, name)
    if name in _ANSWERS:
        return _ANSWERS[name]
    with world_of_one(_SOURCE):
        value = original(name)
    if isinstance(value, type) or not callable(value):
        return value
    return functools.partial(_in_world_of_one, value)


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise BitwiseError(
        f"--bitwise {settings.BITWISE} lets a script see one process, without instep.{name}: "
        f"{_REFUSED[name]}."
    )


def _in_world_of_one(original: Function, *args: Any, **kwargs: Any) -> Any:
    with world_of_one(_SOURCE):
        return original(*args, **kwargs)


ONE_PROCESS_PATCHES = patches(
    "a script of one process, with instep's functions in it",
    ("instep", "__getattr__", _instep_getattr),
    ("instep.training.metrics:Metric", "all_reduce", _in_world_of_one),
)
