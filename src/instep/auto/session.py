"""A script is divided from `start` to `stop`: meet, agree, hide the launcher, put the table in."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from instep import launchers
from instep.auto import patches
from instep.identity import World


@dataclass(eq=False)
class Session:
    """One script that runs unedited on the ranks of a world."""

    world: World
    seed: int
    """What torch, numpy and random were seeded with on every rank."""
    hidden: Mapping[str, str] = field(repr=False)
    """The launcher's variables, which the script does not see."""
    divided: bool = field(default=False)
    """Whether any work was divided so far: then it is too late to stand down."""


_current: Session | None = None


def current() -> Session | None:
    """The session that this process is in."""
    return _current


def start() -> Session | None:
    """Meet the other ranks and let the script that follows see one process.

    Does nothing in a process that another one forked or spawned, or a second time.
    """
    global _current
    if _current is None and multiprocessing.parent_process() is None:
        world = launchers.detect()
        _current = Session(world, 0, dict(os.environ))
        if world.size > 1:
            patches.install()
    return _current


def stop() -> None:
    """Undo everything."""
    global _current
    patches.undo()
    _current = None
