"""A script is divided from `start` to `stop`: every rank runs it, and it sees one process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.unedited import launcher_env
from instep.unedited.errors import UneditedError
from instep.unedited.single_rank import SingleRankSession


@dataclass(eq=False)
class Session:
    """One script that runs unedited on the ranks of a world."""

    world: World
    seed: int
    """What torch, numpy and random were seeded with on every rank."""
    alone: SingleRankSession | None = field(default=None, repr=False)
    """What is in place in a world of one."""
    together: Any = field(default=None, repr=False)
    """What is in place in a world of more."""


_current: Session | None = None


def current() -> Session | None:
    """The session that this process is in."""
    return _current


def start() -> Session | None:
    """Meet the other ranks and let the script that follows see one process.

    Does nothing a second time, or in a process that multiprocessing started: that is no rank.
    Starts this program again where strings would hash differently on the ranks.
    Raises LaunchError.
    """
    global _current
    if _current is None and multiprocessing.parent_process() is None:
        world = launchers.detect()
        if world.size > 1:
            hash_alike()
        launcher_env.narrow(world)
        if world.size == 1:
            alone = SingleRankSession()
            _current = Session(world, alone.seed, alone=alone)
        else:
            _current = _together()
    return _current


def stop() -> None:
    """Undo everything."""
    global _current
    session, _current = _current, None
    if session is not None:
        (session.alone or session.together).end()


def stand_down(reason: str) -> None:
    """Leave the script alone from here on: it runs on every rank as it stands.

    Raises UneditedError where work was divided already.
    """
    session = _current
    if session is None:
        return
    if (
        session.together.has_begun
        or import_module("instep.unedited.sharded_call.modules").call_counts.sharded
    ):
        raise UneditedError.too_late(reason)
    say_left_alone(session.world, reason)
    session.together.forget()
    stop()


def explain(error: BaseException) -> None:
    """Note on an exception that escapes the script what instep knows of it."""
    if _current is not None and _current.together is not None:
        _current.together.explain(error)


def failing(what: str) -> bool:
    """The script fails; returns when that can be said, and whether by this rank."""
    if _current is None or _current.together is None:
        return True
    said_here: bool = _current.together.failing(what)
    return said_here


def say_left_alone(world: World, reason: str) -> None:
    """One line, on rank 0 of several."""
    if world.rank == 0 and world.size > 1:
        print(
            f"instep: every rank runs this script as it is, since {reason}.",
            file=sys.stderr,
            flush=True,
        )


def _together() -> Session:
    together = import_module("instep.unedited.multi_rank").MultiRankSession(stand_down)
    return Session(together.world, together.seed, together=together)


def hash_alike() -> None:
    """Sets of strings have the same order on all ranks: Python decides that as it starts.

    Starts this program again where that is not so.
    """
    if os.environ.get("PYTHONHASHSEED", "random") == "random" and "-" not in sys.orig_argv:
        os.environ["PYTHONHASHSEED"] = "0"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, sys.orig_argv)
