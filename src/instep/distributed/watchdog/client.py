"""In the rank: start its watcher, tell it what happens here, and do what it says.

While all goes well nothing is said, and the thread that listens sleeps.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from instep.distributed.identity.authentication import derive_key
from instep.distributed.identity.launchers import FAILURE_FILE, JOB
from instep.distributed.identity.world import World
from instep.distributed.watchdog import interrupts
from instep.distributed.watchdog.connection import Line
from instep.distributed.watchdog.stack_inspection import (
    format_main_thread_stack,
    main_thread_line,
    main_thread_wait,
)
from instep.process import isolated_command, pending_writes, settings
from instep.process.failure import Failure
from instep.process.last_position import LastPosition, enable_faulthandler, write_position
from instep.process.tracebacks import is_caused_by_another_rank, root_cause, trim_traceback

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]
PATIENCE = 3.0
"""Seconds that a rank which failed waits to hear whether it is the first, or to be ended."""
FIRST = 1000
"""Before what else multiprocessing does at its child's end, such as waiting for other children."""
_attendants: list[Attendant] = []
"""Of this process: one for each time that it has met the others; the last one is in office."""


Listen = Callable[[], tuple[socket.socket, str]]
"""Makes a socket that listens, and says by which name the other ranks find its host."""


def attend(world: World, store: dist.Store, key: bytes | None, listen: Listen) -> None:
    """Have this rank watched, in a world of several. All ranks call this.

    Through the `store` rank 0 says where its watcher, the hub, is; the others wait for that. Who
    calls the hub, which `listen` gives its socket, proves with `key` that it is of this job; where
    there is none, with a token that the store tells.
    """
    if str(settings.WATCH) == "off":
        return
    for earlier in _attendants[-1:]:
        earlier.retire()
    _attendants.append(Attendant(world, _hub(world, store, key, listen)))


def excepthook() -> Hook | None:
    """What tells the watch of this rank's failure; None where `instep run` sees for itself."""
    return _attendants[-1]._fail if _attendants and JOB not in os.environ else None


def _hub(
    world: World, store: dist.Store, secret: bytes | None, listen: Listen
) -> dict[str, object]:
    """Where the hub listens."""
    key = f"instep/distributed/watchdog/{len(_attendants)}"
    known: dict[str, object] = {} if secret is None else {"token": derive_key(secret, key).hex()}
    if world.rank != 0:
        known = json.loads(store.get(key)) | known
        return known | {"hosts": [known.pop("host"), *_master(store)]}
    listener, host = listen()
    told = {"host": host, "port": listener.getsockname()[1]}
    if secret is None:
        known = {"token": secrets.token_hex(16)}
        told |= known
    store.set(key, json.dumps(told))
    return {"listener": listener} | known


def _master(store: dist.Store) -> list[str]:
    """Rank 0's host, by a name that this host knows, if the store has one."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return [store.host] if isinstance(store, dist.TCPStore) else []


def announce_exit() -> None:
    """This rank has come to the end of its script, and begins to wait for the others."""
    for attendant in _attendants[-1:]:
        attendant.announce_exit()


def remove_after_exit(own: str, shared: str | None) -> None:
    """When this rank has ended, however it did, its watcher removes the folder `own`.

    Then also `shared`, if no rank's folder is left in it.
    """
    for attendant in _attendants[-1:]:
        attendant.remove_after_exit(own, shared)


class Attendant:
    """This rank's end of the line to its watcher."""

    def __init__(self, world: World, hub: dict[str, object]) -> None:
        self._world, self._pid = world, os.getpid()
        self._named = threading.Event()
        """Whether the job's first failure was named, or nobody is there to name it."""
        self._follows = False
        """Whether it was another rank's."""
        self._headline = ""
        """What the user is told of it, if it was this rank's."""
        listener = hub.get("listener")
        self._seen = _seen_file()
        passed = {"pidfd": os.pidfd_open(self._pid), "seen": os.dup(self._seen)}
        if JOB not in os.environ:
            passed["crash"] = os.dup(_crash_file())
        if isinstance(listener, socket.socket):
            passed["listener"] = listener.detach()
        ours, theirs = socket.socketpair()
        with theirs:
            watcher = subprocess.Popen(
                isolated_command("instep.distributed.watchdog.watcher", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *passed.values()),
                cwd="/",
                start_new_session=True,
            )
        watcher.returncode = 0  # it outlives this rank, which Popen would warn of
        self._watcher = watcher.pid
        for fd in passed.values():
            os.close(fd)
        self._line = Line(ours)
        self._line.say(
            "begin",
            rank=world.rank,
            size=world.size,
            one_host=world.one_host,
            host=socket.gethostname(),
            pid=self._pid,
            supervised=JOB in os.environ,
            **(hub | passed),
        )
        interrupts.begin(self._line.say)
        self._listener = threading.Thread(target=self._listen, name="instep watch", daemon=True)
        self._listener.start()
        atexit.register(self._finish)
        if JOB not in os.environ:  # `instep run` sees for itself
            self._hook = sys.excepthook
            sys.excepthook = self._fail
            if parent_process() is not None:
                Finalize(None, self._child_ends, exitpriority=FIRST)

    def announce_exit(self) -> None:
        """Who waits for it now waits in vain, which shall be seen soon."""
        self._line.say("exits")

    def remove_after_exit(self, own: str, shared: str | None) -> None:
        """Have the watcher do it."""
        self._line.say("remove", own=own, shared=shared)

    def retire(self) -> None:
        """This rank is about to meet the others anew. Of this watcher nothing is left."""
        self._line.say("retired")
        self._listener.join(PATIENCE)
        atexit.unregister(self._finish)

    # ----------------------------------------------------------------- what happens in this rank

    def _finish(self) -> None:
        if os.getpid() == self._pid:
            self._line.say("finished")

    def _fail(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The innermost sys.excepthook: only the job's first failure is printed, and last."""
        if os.getpid() == self._pid:
            follows = is_caused_by_another_rank(error)
            missed = getattr(root_cause(error), "rank", None) if follows else None
            code = 130 if issubclass(kind, KeyboardInterrupt) else 1
            self._say_failed(code, follows=follows, missed=missed)
            trim_traceback(error)
        self._hook(kind, error, error.__traceback__)

    def _child_ends(self) -> None:
        """What multiprocessing's children raise, and so mp.spawn's, never comes to sys.excepthook;
        but it is still under way when they are finalized."""
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        if code:
            self._say_failed(code if isinstance(code, int) else 1)

    def _say_failed(self, code: int, **facts: object) -> None:
        """Return when this rank may fail: when it is the first, or nobody can say who was."""
        self._line.say("failed", code=code, **facts)
        self._named.wait(PATIENCE)
        if self._follows:
            time.sleep(PATIENCE)  # the watcher ends this rank meanwhile
        os.write(2, self._headline.encode())  # torch's own hook around this one catches prints

    # --------------------------------------------------------------------- what the watcher says

    def _listen(self) -> None:
        self._note()
        while (said := self._line.hear()) is not None:
            for words in said:
                if words["word"] == "where":
                    self._note()
                    self._line.say("stands", wait=main_thread_wait())
                elif words["word"] == "told":
                    self._headline = words["headline"] + "\n"
                    self._named.set()
                elif words["word"] == "hush":
                    self._follows = True
                    self._named.set()
                elif words["word"] == "leave":
                    self._leave(words["code"], words["why"])
                elif words["word"] == "die":
                    self._die(words["text"], words["missed"])
                else:
                    interrupts.hear(words["word"], {"line": main_thread_line(), **words})
        self._named.set()
        interrupts.alone()
        self._line.hang_up()
        os.close(self._seen)
        with suppress(ChildProcessError):  # the script waits for all children itself
            os.waitpid(self._watcher, 0)

    def _note(self) -> None:
        write_position(self._seen, main_thread_line())

    def _die(self, text: str, missed: int | None) -> None:
        """The main thread is stuck, so it cannot raise an error."""
        stack = format_main_thread_stack()
        if FAILURE_FILE not in os.environ:
            os.write(2, f"instep: {text}\n{stack}".encode())
        self._leave(1, f"{text}\n{stack}", missed)

    def _leave(self, code: int, why: str, missed: int | None = None) -> None:
        """End this process with that code, whatever the main thread does."""
        self._line.say("leaving", writing=pending_writes.has_pending_writes())
        pending_writes.wait_for_writes()
        path = os.environ.get(FAILURE_FILE)
        if path is not None:
            rank, now = self._world.rank, time.time()
            Failure(rank, now, code, text=why, is_consequence=True, awaited_rank=missed).write(
                Path(path)
            )
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, OSError):
                stream.flush()
        os._exit(code)


@cache
def _crash_file() -> int:
    """Where a fatal signal leaves Python's account of it, for the watcher."""
    fd = os.memfd_create("crash")
    enable_faulthandler(fd)
    return fd


def _seen_file() -> int:
    """Where this rank notes its line: for `instep run`, or for the watcher alone."""
    path = os.environ.get(FAILURE_FILE)
    if path is None:
        return os.memfd_create("seen")
    return os.open(LastPosition(path).line_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
