"""In the rank: start its watcher, report to it, and carry out its orders.

While all goes well no messages are sent, and the thread that listens sleeps.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from instep.distributed.conditions import note_condition
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.identity.authentication import derive_key
from instep.distributed.identity.launchers import FAILURE_FILE, JOB
from instep.distributed.identity.world import World
from instep.distributed.watchdog.call_stack import (
    format_main_thread_stack,
    main_thread_line,
    main_thread_wait,
)
from instep.distributed.watchdog.connection import Message
from instep.distributed.watchdog.signals import script_handlers
from instep.distributed.watchdog.signals.rank_signals import rank_signals
from instep.distributed.watchdog.stalls import python_stacks
from instep.distributed.watchdog.torch_trace import traced_steps
from instep.distributed.watchdog.watcher_process import (
    open_inherited,
    open_position_file,
    start_process,
)
from instep.process import pending_writes, settings, write_text
from instep.process.failures.last_position import write_position
from instep.process.failures.record import Failure
from instep.process.failures.tracebacks import (
    awaited_rank,
    is_caused_by_another_rank,
    note_thread_limit,
    script_line,
    trim_traceback,
)
from instep.process.process_value import ProcessValue

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]
DECISION_SECONDS = 3.0
"""For which a rank that failed waits to learn whether its failure is the first."""
END_SECONDS = 15.0
"""For which a rank whose failure is not the first waits to be ended by its watcher, which gives the
first one time to exit (`first_failure.FAILED_RANK_SECONDS`)."""
PARENT_SECONDS = 2.0
"""For which a child of multiprocessing that must end waits to be ended by its parent, as mp.spawn
does: if it ended itself, a busy parent might take it for the one that failed first."""
PRIORITY = 1000
"""Of the finalizer: before multiprocessing waits for other children at its child's end."""
_active = ProcessValue["WatcherClient | None"](None)
"""Of the job that this process has joined last."""
_has_failed = ProcessValue(False)
"""Whether an exception has ended this rank's script."""
_exit_now = os._exit
"""As it is before it is replaced in an unedited script, whose ranks wait for rank 0."""

Listen = Callable[[], tuple[socket.socket, str]]
"""Makes a listening socket; also returns the name of its host for the other ranks."""


def start_watcher(
    world: World, store: dist.Store, key: bytes | None, listen: Listen, host: str | None
) -> None:
    """Have this rank watched, in a world of several. Collective.

    Rank 0 puts the address of its watcher, the hub, into `store`; the others wait for it. `listen`
    makes the hub's socket. A watcher proves to the hub with `key` that it is of this job, or, where
    there is none, with a token from the store. `host` is the name by which this rank has
    reached rank 0's host; None where it is not known.
    """
    if str(settings.WATCH) == "off":
        return
    previous, number = _active.value, 0
    if previous is not None:
        previous.detach()
        number = previous.number + 1
    hub = _hub_address(world, store, key, listen, number, host)
    _active.value = WatcherClient(world, hub, number)


def excepthook() -> Hook | None:
    """The hook that reports this rank's failure; None under `instep run`, which sees it itself."""
    client = _active.value
    return None if client is None or JOB in os.environ else client._excepthook


def _hub_address(
    world: World,
    store: dist.Store,
    secret: bytes | None,
    listen: Listen,
    number: int,
    known_host: str | None,
) -> dict[str, object]:
    key = f"instep/distributed/watchdog/{number}"
    address: dict[str, object] = {} if secret is None else {"token": derive_key(secret, key).hex()}
    if world.rank != 0:
        address = json.loads(store.get(key)) | address
        return address | {"hosts": [address.pop("host"), *filter(None, [known_host])]}
    listener, host = listen()
    published = {"host": host, "port": listener.getsockname()[1]}
    if secret is None:
        address = {"token": secrets.token_hex(16)}
        published |= address
    store.set(key, json.dumps(published))
    return {"listener": listener} | address


def announce_exit() -> None:
    """This rank is at the end of its script and begins to wait for the others: one that waits for
    it is deadlocked, which the watchers then find soon."""
    _tell("at_exit")


def announce_failure() -> threading.Event | None:
    """This rank has failed, and waits to see whether rank 0, which may be behind, fails as well.

    Returns what is set once rank 0 waits for others, or no watcher can tell; None without one.
    """
    _tell("failing")
    return None if _active.value is None else _active.value._rank_0_waits


def announce_same_failure() -> None:
    """This rank has failed in the same way as rank 0, which reports it."""
    _tell("fails_alike")


def announce_end() -> None:
    """This rank ends now, and has not failed."""
    if _active.value is not None:
        _active.value._finish()


def announce_single_rank() -> None:
    """This rank goes on without the others, which end."""
    _tell("alone")


def _tell(message_type: str, **fields: object) -> None:
    """Send a message to this rank's watcher, if it has one."""
    if _active.value is not None:
        _active.value.send(message_type, **fields)


def has_failed() -> bool:
    """Whether an exception has ended this rank's script."""
    return _has_failed.value


def has_rank_0_ended() -> bool:
    """Whether rank 0's process has ended, as far as this rank's watcher has told."""
    return _active.value is not None and _active.value.has_rank_0_ended


def report_collectives(error: BaseException) -> None:
    """This rank fails with `error`, perhaps since it disagrees with the others about a collective.

    Only a rank that still runs knows the collectives of torch's own groups.
    """
    _has_failed.value = True
    if _active.value is not None and os.getpid() == _active.value._pid:
        steps = traced_steps(with_stacks=False, line=script_line(error))
        _tell("collectives", steps=steps)


def remove_after_exit(own: str, shared: str | None) -> None:
    """When this rank has ended, in whichever way, its watcher removes the folder `own`.

    Then also `shared`, if no rank's folder is left in it.
    """
    _tell("remove_folders", own=own, shared=shared)


class WatcherClient:
    """This rank's connection to its watcher."""

    def __init__(self, world: World, hub: dict[str, object], number: int) -> None:
        self._world, self._pid = world, os.getpid()
        self.number = number
        """How often this process had joined a job before; equal on all ranks."""
        self._decided = threading.Event()
        """The job's first failure is known, or no watcher is left to choose it."""
        self._is_unwatched = threading.Event()
        """No watcher is left to end this rank."""
        self._rank_0_waits = threading.Event()
        """It does, while this rank has failed; or no watcher is left to tell."""
        self.has_rank_0_ended = False
        """With rank 0 its store has ended, for which torch prints 20 lines at each call."""
        self._is_first = True
        """Whether it may be this rank's."""
        self._headline = ""
        """Of this rank's failure, if it is the first."""
        self._seen = open_position_file()
        passed = open_inherited(self._pid, self._seen, hub.get("listener"))
        self._watcher, self._connection = start_process(passed.values())
        self.send = self._connection.send
        self.send(
            "start",
            rank=world.rank,
            size=world.size,
            local_rank=world.local_rank,
            host=socket.gethostname(),
            pid=self._pid,
            supervised=JOB in os.environ,
            source=world.source,
            stall_seconds=int(settings.STALL_SECONDS),
            timeout=int(settings.TIMEOUT),
            stack_signal=int(python_stacks.STACK_SIGNAL),
            **(hub | passed),
        )
        rank_signals.install(self.send)
        script_handlers.install()
        self._listener = threading.Thread(target=self._listen, name="instep watch", daemon=True)
        self._listener.start()
        atexit.register(self._finish)
        if JOB not in os.environ:  # `instep run` sees failures itself
            self._previous_hook = sys.excepthook
            sys.excepthook = self._excepthook
            if parent_process() is not None:
                Finalize(None, self._child_ends, exitpriority=PRIORITY)

    def detach(self) -> None:
        """End this watcher: the rank is about to join a job anew."""
        self.send("detach")
        self._listener.join(DECISION_SECONDS)
        atexit.unregister(self._finish)

    # --------------------------------------------------------------------------- to the watcher

    def _finish(self) -> None:
        if os.getpid() == self._pid:
            self.send("finished")

    def _excepthook(
        self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The innermost sys.excepthook: only the job's first failure is printed, and last."""
        if os.getpid() == self._pid:
            code = 130 if issubclass(error_type, KeyboardInterrupt) else 1
            note_condition(error)
            note_thread_limit(error)
            report_collectives(error)
            follows, awaited = is_caused_by_another_rank(error), awaited_rank(error)
            self._report_failure(code, is_consequence=follows, awaited_rank=awaited)
            trim_traceback(error)
        self._previous_hook(error_type, error, error.__traceback__)

    def _child_ends(self) -> None:
        """Report the exception of a child of multiprocessing, as of mp.spawn: it never reaches
        sys.excepthook, but is still being handled when the finalizers run."""
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        if code:
            assert error is not None
            self._report_failure(
                code if isinstance(code, int) else 1,
                is_consequence=is_caused_by_another_rank(error),
                awaited_rank=awaited_rank(error),
            )

    def _report_failure(self, code: int, **fields: object) -> None:
        """Return when this rank may fail: it is the first, or nobody knows the first."""
        self.send("failed", code=code, **fields)
        self._decided.wait(DECISION_SECONDS)
        if not self._is_first:
            self._is_unwatched.wait(END_SECONDS)  # the watcher ends this rank meanwhile
        write_text(2, self._headline)  # torch's own hook around this one catches prints

    # ------------------------------------------------------------------------- from the watcher

    def _listen(self) -> None:
        self._record_line()
        while (messages := self._connection.recv()) is not None:
            for message in messages:
                self._handle(message.pop("type"), message)
        for event in (self._decided, self._is_unwatched, self._rank_0_waits):
            event.set()
        rank_signals.disconnect()
        self._connection.close()
        os.close(self._seen)
        with suppress(ChildProcessError):  # the script waits for all children itself
            os.waitpid(self._watcher, 0)

    def _handle(self, message_type: str, message: Message) -> None:
        if message_type == "get_position":
            self._record_line()
            recorder.update_followed()
            self.send("position", wait=main_thread_wait())
        elif message_type == "get_collectives":
            self.send("collectives", steps=traced_steps(with_stacks=message["with_stacks"]))
        elif message_type == "get_stacks":
            stacks = python_stacks.format_stacks()
            where = python_stacks.main_thread_fields()
            wait = main_thread_wait()
            where["wait"] = "" if wait is None else f"{wait['call']} at {wait['line']}"
            self.send("stacks", line=main_thread_line(), stacks=stacks, **where)
        elif message_type == "first":
            self._headline = message["headline"] + "\n"
            self._decided.set()
        elif message_type == "not_first":
            self._is_first = False
            self._decided.set()
        elif message_type == "rank_0_waits":
            self._rank_0_waits.set()
        elif message_type == "rank_0_ended":
            self.has_rank_0_ended = True
        elif message_type == "exit":
            self._exit(message["code"], message["reason"])
        elif message_type == "abort":
            self._abort(message["text"], message["awaited_rank"])
        else:
            rank_signals.handle_message(message_type, {"line": main_thread_line(), **message})

    def _record_line(self) -> None:
        write_position(self._seen, main_thread_line())

    def _abort(self, text: str, awaited_rank: int | None) -> None:
        """End this rank with an error that the main thread, which is blocked, cannot raise."""
        stack = format_main_thread_stack()
        if FAILURE_FILE not in os.environ:
            with suppress(OSError):  # the launcher, which reads it, may have ended
                write_text(2, f"instep: {text}\n{stack}")
        self._exit(1, f"{text}\n{stack}", awaited_rank)

    def _exit(self, code: int, reason: str, awaited_rank: int | None = None) -> None:
        """End this process with that code, whatever the main thread does."""
        self.send("exiting", writing=pending_writes.has_pending_writes())
        pending_writes.wait_for_writes()
        path = os.environ.get(FAILURE_FILE)
        if path is not None:
            rank, now = self._world.rank, time.time()
            Failure(
                rank, now, code, text=reason, is_consequence=True, awaited_rank=awaited_rank
            ).write(Path(path))
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, OSError):
                stream.flush()
        if parent_process() is not None and awaited_rank is None:
            time.sleep(PARENT_SECONDS)
        _exit_now(code)
