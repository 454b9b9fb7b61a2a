"""Groups of "gloo" become groups of "instep", and each that is made is noted in a file.

PyTorch's tests skip themselves for a backend whose name they do not know. So the group keeps the
name "gloo", and the note says of which class it really is.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

GLOO_GROUP = dist.ProcessGroupGloo
GLOO = ("gloo", "undefined", "cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl")


class _NamesOfGloo(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(GLOO_GROUP, name)

    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, GLOO_GROUP)


class GroupForGloo(metaclass=_NamesOfGloo):
    """What tests that call `ProcessGroupGloo(store, rank, size, options)` get in its place: a group
    of "instep". Of the options it takes the name and the timeout."""

    def __new__(cls, store: dist.Store, rank: int, size: int, options: Any = None) -> Any:
        """The group. Collective."""
        from instep.distributed.shm.registration import create_group

        asked = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=getattr(options, "_timeout", options or dist.default_pg_timeout),
            group_id=getattr(options, "group_name", ""),
            global_ranks_in_group=[],
        )
        return create_group(asked)  # type: ignore[arg-type]


def install(backend: str, notes: str) -> None:
    """Make groups of `backend` ("instep" or "gloo"); append the class of each to the file `notes`.

    Does nothing where it was called before in this process.
    """
    make = c10d._new_process_group_helper
    if hasattr(make, "of_the_suites"):
        return
    if backend == "instep":
        import instep.shm

        instep.shm.register()
        dist.ProcessGroupGloo = GroupForGloo  # type: ignore[misc]

    def make_and_note(*args: Any, **kwargs: Any) -> Any:
        asked = args[3]
        if backend == "instep" and str(asked).lower() in GLOO:
            args = (*args[:3], dist.Backend("instep"), *args[4:])
        group, store = make(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup) and store is not None:
            with open(notes, "a") as file:
                file.write(f"{class_of(group)}\n")
            if args[3] != asked:
                c10d._world.pg_map[group] = (dist.Backend("gloo"), store)
        return group, store

    make_and_note.of_the_suites = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make_and_note


def class_of(group: dist.ProcessGroup) -> str:
    """ "shared memory" for our group, else the class of the group or of its backend for CPUs."""
    if getattr(group, "shares_memory", lambda: False)():
        return "shared memory"
    if type(group) is not dist.ProcessGroup:
        return type(group).__name__
    try:
        import torch

        return type(group._get_backend(torch.device("cpu"))).__name__
    except RuntimeError:
        return type(group).__name__


def install_from_environment() -> None:
    """`install`, as the variables SUITE_BACKEND and SUITE_NOTES say."""
    install(os.environ["SUITE_BACKEND"], os.environ["SUITE_NOTES"])
