"""The watcher of one rank: a program of the standard library only, which starts in 20 ms.

The rank (`client`) starts it with one argument, the file descriptor of their connection. It
outlives the rank only to report how it ended, a second or a few; that of rank 0, which is the hub,
stays until all have ended.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from instep.distributed.flight_record.record_format import read
from instep.distributed.watchdog.connection import Connection, Message, connect
from instep.distributed.watchdog.delay_check import DelayCheck
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.messages import failure_fields
from instep.distributed.watchdog.mismatch import recorded_steps
from instep.distributed.watchdog.progress_checks import ProgressChecks
from instep.distributed.watchdog.stalls.job_socket import JobSocket
from instep.distributed.watchdog.stalls.rank_watch import RankWatch
from instep.process import write_text
from instep.process.exit_status import format_failure, ranks_of, shell_exit_code
from instep.process.failures.last_position import format_last_words, read_whole
from instep.process.pending_writes import MARKER_NAME, WAIT_LIMIT, remove_drafts
from instep.process.procfs import close_stderr, exit_code, has_ended, kill, set_process_name

REPLY_SECONDS, EXIT_SECONDS = 0.7, 3.0
"""For the rank to confirm that it exits, and then to have exited; else it is killed."""
SUPERVISED_SECONDS = 10.0
"""The same for a rank of `instep run`, which has killed it by then, and would take a rank that
another process has killed for the culprit."""
REPORT_SECONDS = 5.0
"""For the hub to say that all other ranks have ended; on a busy host that takes seconds. Then a
rank's death is reported without."""
SIGNALS_FOR_THE_RANK = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)
"""Slurm sends a job's signals to every process of a task."""
SIGNALS_TO_HUB = ("interrupt", "paused", "progress", "interrupted")
SIGNALS_TO_RANK = ("pause", "interrupt_at", "interrupt_now", "get_progress")
"""Messages about signals that take effect on all ranks, which the watcher only forwards."""


class WatchedProcess:
    """The rank's process: its end, what it may leave unfinished, and what it leaves behind."""

    def __init__(self, loop: EventLoop, start: Message) -> None:
        self._loop = loop
        self.pidfd: int = start["pidfd"]
        self.ended_before = has_ended(self.pidfd)
        """Whether it had ended before this watcher started."""
        self._seen_file, self._crash_file = start["seen"], start.get("crash")
        self._exits = self._is_writing = False
        """Whether it has confirmed that it exits; whether it finishes a file before."""
        self.folders: tuple[str, str | None] | None = None
        """To be removed when it has ended: its own, and that which all ranks share."""

    def last_position(self, code: int | None) -> str:
        """The lines that are known about it, if it died silently."""
        crash = read_whole(self._crash_file) if code is not None and code < 0 else ""
        return format_last_words(crash, read_whole(self._seen_file), time.monotonic())

    def await_exit(self, seconds: float, *, replies: bool = False) -> None:
        """Kill it unless it exits in time, having confirmed so if it `replies` to messages."""
        if replies:
            self._loop.call_later(REPLY_SECONDS, lambda: None if self._exits else kill(self.pidfd))
        self._loop.call_later(seconds, self._kill)

    def confirm_exit(self, *, is_writing: bool) -> None:
        """Note that the rank has confirmed that it exits; if it `is_writing`, after its file."""
        self._exits, self._is_writing = True, is_writing

    def _kill(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._loop.call_later(WAIT_LIMIT, self._kill)
        else:
            kill(self.pidfd)

    def clean_up(self) -> None:
        """Remove its folders, once it has ended."""
        if self.folders is None or not has_ended(self.pidfd, WAIT_LIMIT):
            return
        import shutil  # few watchers need it

        own, shared = self.folders
        remove_drafts(Path(own, MARKER_NAME))
        shutil.rmtree(own, ignore_errors=True)
        if shared is not None and not [*Path(shared).glob("rank*")]:
            shutil.rmtree(shared, ignore_errors=True)


class Watcher:
    """Watches one rank, and ends it when the job has failed."""

    def __init__(self, loop: EventLoop, rank: Connection, hub: Connection, start: Message) -> None:
        self._loop, self._rank_connection, self._hub = loop, rank, hub
        self._rank, self._size, self._host = start["rank"], start["size"], start["host"]
        self._supervised = start["supervised"]
        self._record_file: int = start["record"]
        """For `record_format.read`."""
        self._finished = self._reported = self._exit_sent = self._ended = False
        """The rank's program has ended; it has reported a failure; we told it to exit; its process
        has ended."""
        self._hub_is_lost = False
        self._failure: Message | None = None
        """The job's first failure."""
        self._abort_fields: Message | None = None
        """The error with which this rank is to end, and the rank for which it waits in vain."""
        self._process = WatchedProcess(loop, start)
        self._stalls = RankWatch(loop, rank, hub, start)
        hub.send("hello", rank=self._rank, host=self._host, token=start["token"])
        loop.add_reader(rank, self._recv_from_rank)
        loop.add_reader(hub, self._recv_from_hub)
        loop.add_reader(self._process.pidfd, self._rank_ended)
        if (launcher := start.get("launcher")) is not None:
            loop.add_reader(launcher, partial(self._launcher_ended, launcher, start["source"]))
        self._checks = ProgressChecks(loop, rank, hub, start, self._stalls, self._abort)
        self._delay_check = DelayCheck(loop, hub, start)

    # ------------------------------------------------------------------------------ the rank

    def _recv_from_rank(self) -> None:
        messages = self._rank_connection.recv()
        if messages is None:
            self._loop.remove_reader(self._rank_connection)
        self.handle(messages or ())

    def handle(self, messages: Iterable[Message]) -> None:
        """Handle messages of the rank."""
        for message in messages:
            message_type = message.pop("type")
            if message_type == "finished":
                self._finished = True
                self._hub.send("finished")
            elif message_type == "failed":
                text = f"failed (exit code {message['code']})"
                self._report_failure(
                    message["code"],
                    text,
                    is_consequence=message.get("is_consequence", False),
                    awaited_rank=message.get("awaited_rank"),
                )
            elif message_type == "alone":
                self._stalls.set_single_rank()
            elif message_type in ("at_exit", "failing", "fails_alike"):
                self._hub.send(message_type)
            elif message_type == "exiting":
                self._process.confirm_exit(is_writing=message["writing"])
            elif message_type == "position":
                self._checks.add_position(message["wait"])
            elif message_type == "stacks":
                self._stalls.add_stacks(message)
            elif message_type in (*SIGNALS_TO_HUB, "collectives"):
                self._hub.send(message_type, **message)
            elif message_type == "remove_folders":
                self._process.folders = message["own"], message["shared"]
            elif message_type == "detach":
                self._process.folders = None
                self._hub.send("ended", code=0)
                self._loop.stop()

    def _report_failure(
        self,
        code: int,
        description: str,
        *,
        is_consequence: bool = False,
        awaited_rank: int | None = None,
    ) -> None:
        self._reported = True
        failure = failure_fields(self._rank, self._host, code, description, silent=False)
        self._hub.send(
            "failed", **failure, is_consequence=is_consequence, awaited_rank=awaited_rank
        )

    def _rank_ended(self) -> None:
        now = None if self._process.ended_before else time.monotonic()
        self._loop.remove_reader(self._process.pidfd)
        self._ended = True
        self._stalls.rank_ended()
        self._checks.rank_ended()
        self._delay_check.rank_ended()
        code = exit_code(self._process.pidfd)
        silent = not (self._reported or self._exit_sent) and (
            code != 0 if code is not None else not self._finished
        )
        if silent:
            failure = failure_fields(self._rank, self._host, code, silent=True)
            position = self._process.last_position(code)
            self._hub.send("failed", **failure, last_position=position, time=now)
        self._hub.send("ended", code=code)
        if code != 0:
            self._checks.kill_children()
        if silent:
            wait = 0.0 if self._hub_is_lost else REPORT_SECONDS
            self._loop.call_later(wait, self._print_failure)
        elif self._rank == 0:
            close_stderr()
        else:
            self._loop.stop()

    def _launcher_ended(self, pidfd: int, name: str) -> None:
        """End the rank, which nothing else would end, unless its launcher has waited for it."""
        self._loop.remove_reader(pidfd)
        if not (self._finished or self._failure or has_ended(self._process.pidfd)):
            text = f"has lost its launcher ({name}), which has ended before it"
            self._abort(f"rank {self._rank} of {self._size} {text}.", description=text)

    def _let_rank_exit(self) -> None:
        """Tell the rank to exit, and kill it if it does not."""
        if self._ended or self._exit_sent or self._failure is None:
            return
        if self._supervised and self._failure["host"] == self._host:
            return  # `instep run` on this host does it
        self._exit_sent = True
        code, reason = shell_exit_code(self._failure["code"]), self._failure["headline"]
        self._rank_connection.send("exit", code=code, reason=reason)
        at_end = self._reported or self._finished  # where its threads receive nothing
        if self._supervised:
            self._process.await_exit(SUPERVISED_SECONDS)
        else:
            self._process.await_exit(EXIT_SECONDS, replies=not at_end)

    def clean_up(self) -> None:
        """Remove the rank's folders, once it has ended."""
        self._process.clean_up()

    # ------------------------------------------------------------------------------- the hub

    def _recv_from_hub(self) -> None:
        try:
            messages = self._hub.recv()
        except OSError as error:
            messages = None
            lost = f"is lost: its host does not answer ({error.strerror})"
            self._failure = failure_fields(0, "", 1, lost, silent=True)
            self._failure["headline"] = format_failure(0, self._size, lost, (), (self._rank,))
            self._let_rank_exit()
        if messages is None:
            self._loop.remove_reader(self._hub)
            self._hub_is_lost = True
            self._checks.add_ended_ranks({0})
            if self._ended:
                self._print_failure()
        for message in messages or ():
            self._handle_from_hub(message.pop("type"), message)

    def _handle_from_hub(self, message_type: str, message: Message) -> None:
        if message_type == "ended":
            ended = ranks_of(message["ranks"])
            self._checks.add_ended_ranks(ended)
            self._stalls.others_ended(ended)
            if 0 in ended:
                self._rank_connection.send("rank_0_ended")
        elif message_type == "failed":
            self._job_failed(message)
        elif message_type == "exit":
            self._let_rank_exit()
        elif message_type == "describe":
            self._stalls.describe(**message)
        elif message_type == "answer":
            self._stalls.handle_reply(message)
        elif message_type == "rank_0_waits":
            self._rank_connection.send("rank_0_waits")
        elif message_type == "check_often":
            self._checks.shorten_interval()
        elif message_type == "abort":
            self._abort(message["text"])
        elif message_type == "get_collectives":
            self._hub.send("collectives", steps=recorded_steps(read(self._record_file)))
            if not self._finished:
                self._rank_connection.send("get_collectives", **message)
        elif message_type == "over":
            if self._failure is not None:
                self._failure["headline"] = message["headline"]
            self._print_failure()
        elif message_type in SIGNALS_TO_RANK:
            self._rank_connection.send(message_type, **message)

    def _job_failed(self, first: Message) -> None:
        self._failure = first
        if self._ended:
            return
        if first["rank"] != self._rank:
            self._rank_connection.send("not_first")
        elif self._abort_fields is not None:
            self._rank_connection.send("abort", **self._abort_fields)
        else:
            self._rank_connection.send("first", headline=first["headline"])

    def _print_failure(self) -> None:
        """Print the failure of a rank that died silently, after all others have ended, and end."""
        first = self._failure
        if first is not None and first["silent"] and not self._supervised:
            lost = first["description"].startswith("is lost")
            if first["rank"] == self._rank or (lost and self._rank == 0):
                text = f"{first['headline']}\n{first.get('last_position', '')}"
                with suppress(OSError):  # the launcher, which reads it, may have ended
                    write_text(2, text)
        self._loop.stop()

    def _abort(self, text: str, awaited_rank: int | None = None, description: str = "") -> bool:
        """Let the rank end with this error; returns False if it is to end with another one."""
        if self._abort_fields is not None:
            return False
        self._abort_fields = {"text": text, "awaited_rank": awaited_rank}
        self._report_failure(
            1,
            description or "waits in vain",
            is_consequence=not description,
            awaited_rank=awaited_rank,
        )
        return True


def main(fd: str) -> None:
    """The program: the rank's first message, "start", names the process to watch."""
    for number in SIGNALS_FOR_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    set_process_name("instep-watch")
    rank = Connection(socket.socket(fileno=int(fd)))
    messages = rank.recv()
    if not messages:
        return
    start, *others = messages
    loop = EventLoop()
    if start["rank"] == 0:
        hub = _start_hub(loop, start)
    else:
        reached = connect(start["hosts"], start["port"])
        if reached is None:
            return
        hub = reached
    watcher = Watcher(loop, rank, Connection(hub), start)
    watcher.handle(others)
    loop.run()
    watcher.clean_up()


def _start_hub(loop: EventLoop, start: Message) -> socket.socket:
    """Start the hub in this process, which is rank 0's watcher; returns its connection to it."""
    from instep.distributed.watchdog.hub.hub import Hub  # the other watchers do without it

    listener = socket.socket(fileno=start["listener"])
    ours, theirs = socket.socketpair()
    hub = Hub(loop, start["size"], listener, start["token"], start["pid"])
    hub.new_connections.add(theirs)
    with suppress(OSError):
        JobSocket(loop, start["pid"], hub.stalls.handle_request)
    return ours
