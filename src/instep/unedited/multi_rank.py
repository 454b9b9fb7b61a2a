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

from instep.distributed.communication import rank_local
from instep.distributed.communication.collectives import barrier
from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog import client
from instep.distributed.watchdog.stack_inspection import wait_at_exit
from instep.process import settings, storage, unfinished_files
from instep.process.procfs import boot_id
from instep.process.tracebacks import in_words
from instep.unedited import launcher_env, opt_out, patch_table, seeds, std_streams
from instep.unedited.files import os_functions, write_protection
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.generations import Generations, before_of
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from instep.unedited.processes import children
from instep.unedited.processes.rebasing import Rebasing
from instep.unedited.rank0_relay import Relay
from instep.unedited.sharded_call.run import backward

PATIENCE = 1.5
"""Seconds. Where all ranks fail alike, rank 0 has said so by then."""
_FACTS, _FAILED, _DONE, _NEVER = "facts", "failed", "done", "never"


@dataclass(frozen=True)
class Facts:
    """What rank 0 tells the others at the beginning."""

    seed: int
    terminal: std_streams.Terminal
    host: str
    folder: str
    """For this job's layers, on that host."""


class MultiRankSession:
    """Everything that is in place from `begin` to `end`."""

    def __init__(self, claimed: opt_out.Claimed) -> None:
        """Meet the other ranks and put everything in place. Collective. Raises LaunchError."""
        self._in_place = False
        self._has_failed = False
        self._process = os.getpid()
        atexit.register(self.end)  # after what rendezvous and the script register
        self.world = _meet()
        self._hook = sys.excepthook
        atexit.register(self._leave_together)
        self._store = dist.PrefixStore("instep", bootstrap.store())
        facts = _facts(self._store, self.world)
        self.seed = facts.seed
        self._folder = _Folder(facts, self.world)
        unfinished_files.begin(self._folder.mark())
        if launchers.FAILURE_FILE in os.environ:
            write_protection.spare(os.path.dirname(os.environ[launchers.FAILURE_FILE]))
        write_protection.spare(*self._folder.places())
        self.has_begun = False
        """Whether it is too late to leave the script alone."""
        self._relay = Relay(self._store, self.world.rank, self.world.size)
        self._streams = std_streams.Streams(self.world.rank, facts.terminal, self._relay)
        barrier()  # a rank whose script ends at once would leave the others alone above
        self._in_place = True
        launcher_env.hide()
        seeds.sow(self.seed)
        role = self._folder.role()
        os_functions.play(role)
        std_streams.use(self._streams)
        children.begin(self._relay, self._folder.rebasing(role), patch_table.see_files)
        opt_out.begin(claimed)
        rank_local.register_rank()
        backward.on_first_work(self._begin)
        patch_table.install()
        self._streams.enter()
        sys.excepthook = self._heard_once

    def _begin(self) -> None:
        """From here on the ranks stay together, so those other than 0 can be confined."""
        self.has_begun = True
        if self.world.rank != 0:
            write_protection.confine()

    def explain(self, error: BaseException) -> None:
        """Note on an exception that escapes the script what instep knows of it."""
        write_protection.explain(error, self.world.rank)

    def end(self) -> None:
        """Everything is as it was, except that the ranks still know each other."""
        if not self._in_place or os.getpid() != self._process:
            return
        self._in_place = False
        patch_table.undo()
        backward.on_first_work(None)
        rank_local.unregister_rank()
        opt_out.end()
        children.end()
        std_streams.use(None)
        os_functions.play(None)
        self._streams.leave()
        launcher_env.show()
        sys.excepthook = self._hook
        self._folder.leave()

    def forget(self) -> None:
        """The ranks do not know each other any more, and can meet anew. Collective.

        At the same store, under other keys: `stores.again`.
        """
        barrier()
        del self._store
        self._relay.close()
        bootstrap.leave()

    def failing(self, what: str) -> bool:
        """The script fails; returns whether this rank is to say so.

        What all ranks do alike is rank 0's to say, when it comes to it; the others wait for its
        end. Another rank speaks if rank 0 comes to another end, or to none in PATIENCE seconds.
        """
        if self._has_failed or not self._in_place:
            return True
        self._has_failed = True
        try:
            if self.world.rank == 0:
                self._store.set(_FAILED, what)
                return True
            self._store.wait([_FAILED], timedelta(seconds=PATIENCE))
            if self._store.get(_FAILED) != what.encode():
                return True
        except RuntimeError:  # rank 0, who keeps the store, may have gone
            return True
        with suppress(RuntimeError):
            self._store.wait([_NEVER], settings.patience())
        return False

    def _leave_together(self) -> None:
        """Rank 0 keeps the store, and it may be the last one to come to the script's end."""
        if self._has_failed or not self._in_place or os.getpid() != self._process:
            return
        if self.world.rank == 0:
            self._store.set(_FAILED, "")
        self._store.set(f"{_DONE}{self.world.rank}", "")
        everybody = [f"{_DONE}{rank}" for rank in range(self.world.size)]
        client.announce_exit()
        with suppress(RuntimeError):  # rank 0 has gone: it waited for all
            wait_at_exit(lambda: self._store.wait(everybody, settings.patience()))

    def _heard_once(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        """For sys.excepthook."""
        heard = self.failing(in_words(error))
        self.explain(error)
        if heard and self.world.rank != 0:
            self._streams.leave()
        if heard:
            self._hook(kind, error, frames)


def _meet() -> World:
    """With keys of its own: should the script start a process group, it finds none of ours."""
    hook = sys.excepthook
    world = bootstrap.init_apart("unedited")
    # Not torch's, which puts the rank before each line of a traceback.
    sys.excepthook = client.excepthook() or hook
    return world


def _facts(store: dist.Store, world: World) -> Facts:
    if world.rank == 0:
        facts = Facts(seeds.draw(), std_streams.Terminal.here(), _host(), _new_folder(world))
        store.set(_FACTS, pickle.dumps(facts))  # type: ignore[arg-type]  # the stub knows only str
        return facts
    told: Facts = pickle.loads(store.get(_FACTS))  # verified: rank 0 has written it
    return told


def _host() -> str:
    return f"{socket.gethostname()} {boot_id()}"


def _new_folder(world: World) -> str:
    """A folder for each rank. `instep run` removes it whatever happens; else the last one does."""
    above = os.environ.get(launchers.FAILURE_FILE)
    beside = storage.folder(world.local_size) if above is None else Path(above).parent
    folder = tempfile.mkdtemp(prefix="instep-", dir=beside)
    for rank in range(world.size):
        os.mkdir(os.path.join(folder, f"rank{rank}"))
    return os.path.realpath(folder)


def _mine(world: World) -> str:
    """A folder for this rank, whose host is not rank 0's."""
    return tempfile.mkdtemp(prefix="instep-", dir=storage.folder(world.local_size))


class _Folder:
    """Where this rank's layers lie."""

    def __init__(self, facts: Facts, world: World) -> None:
        self._shared = facts.folder if facts.host == _host() else None
        if self._shared is not None and not os.path.isdir(self._shared):
            self._shared = None  # the same machine in another container
        self._own = (
            os.path.join(self._shared, f"rank{world.rank}")
            if self._shared is not None
            else os.path.realpath(_mine(world))
        )
        self._layers = None if world.rank == 0 else Generations(self._own, self._shared)

        client.remove_after_exit(self._own, self._shared)

    def role(self) -> Rank0Files | OverlayFiles:
        """This rank's way with files."""
        if self._layers is not None:
            return OverlayFiles(self._layers.own, self._layers.before)
        assert self._shared is not None
        return Rank0Files(before_of(self._shared, 0))

    def rebasing(self, role: Rank0Files | OverlayFiles) -> Rebasing:
        """What the files are after a command."""
        return Rebasing(role, self._shared, self._layers)

    def places(self) -> list[str]:
        """All folders in which this rank writes."""
        return [self._own, *([] if self._shared is None else [self._shared])]

    def mark(self) -> Path:
        """Where this rank says which file it is writing: to the supervisor, else to its watcher."""
        if launchers.FAILURE_FILE in os.environ:
            return unfinished_files.mark_at(Path(os.environ[launchers.FAILURE_FILE]))
        os.makedirs(self._own, mode=0o700, exist_ok=True)
        return Path(self._own, unfinished_files.MARK)

    def leave(self) -> None:
        """Remove what is this rank's, and what is everybody's after the last one."""
        with bypass_overlay():
            shutil.rmtree(self._own, ignore_errors=True)
            if self._shared is not None and not [*Path(self._shared).glob("rank*")]:
                shutil.rmtree(self._shared, ignore_errors=True)
