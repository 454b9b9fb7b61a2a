"""Several ranks that look like one process: meet, agree, put everything in place, take it out."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from instep import knobs, launchers, rendezvous
from instep.auto import children, files, guards, hiding, patches, seeds, streams
from instep.auto.layers import Layer
from instep.auto.overlay import Keeper, Shadow
from instep.auto.real import real
from instep.auto.relay import Relay
from instep.collectives import barrier
from instep.identity import World

PATIENCE = 2.0
"""Seconds. Where all ranks fail alike, rank 0 has said so by then."""
_FACTS, _FAILED, _DONE = "facts", "failed", "done"


@dataclass(frozen=True)
class Facts:
    """What rank 0 tells the others at the beginning."""

    seed: int
    terminal: streams.Terminal
    host: str
    folder: str
    """For this job's layers, on that host."""


class Together:
    """Everything that is in place from `begin` to `end`."""

    def __init__(self, world: World, claimed: guards.Claimed) -> None:
        """Meet the other ranks and put everything in place. Collective."""
        self._hook = sys.excepthook
        self._in_place = False
        atexit.register(self.end)  # after what rendezvous and the script register
        self.world = rendezvous.init()
        atexit.register(self._keep_the_store)
        sys.excepthook = self._hook  # torch puts the rank before each line of a traceback
        self._store = dist.PrefixStore("instep", rendezvous.store())
        facts = _facts(self._store, self.world)
        self.seed = facts.seed
        self._process = os.getpid()
        self._folder = _Folder(facts, self.world.rank)
        self._has_failed = False
        barrier()  # a rank whose script ends at once would leave the others alone in `init`
        relay = Relay(self._store, self.world.rank)
        self._streams = streams.Streams(self.world.rank, facts.terminal, relay)
        self._in_place = True
        hiding.hide()
        seeds.sow(self.seed)
        files.play(self._folder.role())
        streams.use(self._streams)
        children.begin(relay, patches.see_files)
        guards.begin(claimed)
        patches.install()
        self._streams.enter()
        sys.excepthook = self._failed

    def end(self) -> None:
        """Everything is as it was, except that the ranks still know each other."""
        if not self._in_place or os.getpid() != self._process:
            return
        self._in_place = False
        patches.undo()
        guards.end()
        children.end()
        streams.use(None)
        files.play(None)
        self._streams.leave()
        hiding.show()
        sys.excepthook = self._hook
        self._folder.leave()

    def _keep_the_store(self) -> None:
        """Rank 0, who keeps the store, ends last: the others may still be told something."""
        if not self._in_place or self._has_failed or os.getpid() != self._process:
            return
        if self.world.rank != 0:
            self._store.set(f"{_DONE}{self.world.rank}", "")
            return
        others = [f"{_DONE}{rank}" for rank in range(1, self.world.size)]
        self._store.wait(others, timedelta(seconds=int(knobs.TIMEOUT)))

    def _failed(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        """An exception that all ranks raise alike is heard once, as rank 0's."""
        self._has_failed = True
        what = f"{kind.__name__}: {error}"
        if self.world.rank == 0:
            with suppress(RuntimeError):
                self._store.set(_FAILED, what)
        elif issubclass(kind, KeyboardInterrupt) or self._is_rank_0s(what):
            return
        else:
            self._streams.leave()
            print(f"instep: {self.world}:", file=sys.stderr)
        self._hook(kind, error, frames)

    def _is_rank_0s(self, what: str) -> bool:
        with suppress(RuntimeError):  # rank 0, who keeps the store, may have gone
            self._store.wait([_FAILED], timedelta(seconds=PATIENCE))
            return self._store.get(_FAILED) == what.encode()
        return False


def _facts(store: dist.Store, world: World) -> Facts:
    if world.rank == 0:
        facts = Facts(seeds.draw(), streams.Terminal.here(), _host(), _new_folder(world))
        store.set(_FACTS, pickle.dumps(facts))  # type: ignore[arg-type]  # the stub knows only str
        return facts
    told: Facts = pickle.loads(store.get(_FACTS))
    return told


def _host() -> str:
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"


def _new_folder(world: World) -> str:
    """A folder for each rank. `instep run` removes it whatever happens; else the last one does."""
    above = os.environ.get(launchers.FAILURE_FILE)
    folder = tempfile.mkdtemp(prefix="instep-", dir=None if above is None else Path(above).parent)
    for rank in range(world.size):
        os.mkdir(os.path.join(folder, f"rank{rank}"))
    return folder


class _Folder:
    """Where this rank's layers lie."""

    def __init__(self, facts: Facts, rank: int) -> None:
        self._shared = facts.folder if facts.host == _host() else None
        if self._shared is not None and not os.path.isdir(self._shared):
            self._shared = None  # the same machine in another container
        self._rank = rank
        self._own = (
            os.path.join(self._shared, f"rank{rank}")
            if self._shared is not None
            else tempfile.mkdtemp(prefix="instep-")
        )

    def role(self) -> Keeper | Shadow:
        """This rank's way with files."""
        before = None if self._shared is None else Layer(os.path.join(self._shared, "before"))
        if self._rank == 0:
            assert before is not None
            return Keeper(before)
        return Shadow(Layer(self._own), before)

    def leave(self) -> None:
        """Remove what is this rank's, and what is everybody's after the last one."""
        with real():
            shutil.rmtree(self._own, ignore_errors=True)
            if self._shared is not None and not [*Path(self._shared).glob("rank*")]:
                shutil.rmtree(self._shared, ignore_errors=True)
