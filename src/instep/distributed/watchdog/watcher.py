"""The watcher of one rank: a program of the standard library only, which starts in 20 ms.

The rank (`client`) starts it with one argument, the file descriptor of their connection. It
outlives the rank only to report how it ended, a second or a few; that of rank 0, which is the hub,
stays until all have ended.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from instep.distributed.flight_record.record_format import read, read_wait
from instep.distributed.watchdog.connection import Connection, Message, connect
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.hub import start_hub
from instep.distributed.watchdog.messages import failure_fields
from instep.distributed.watchdog.mismatch import recorded_steps
from instep.distributed.watchdog.stalls.rank_watch import RankWatch
from instep.process.exit_status import format_failure, format_ranks, ranks_of, shell_exit_code
from instep.process.last_position import format_last_words, read_whole
from instep.process.pending_writes import MARKER_NAME, WAIT_LIMIT, remove_drafts
from instep.process.procfs import (
    close_stderr,
    context_switches,
    descendants,
    exit_code,
    has_ended,
    kill,
    read_stat,
    set_process_name,
)

CHECK_SECONDS, FREQUENT_CHECK_SECONDS = 2.5, 0.3
"""Between two checks of the rank; the second once any rank has come to its end."""
IDLE_TICKS = 3
"""Clock ticks between two checks that are no work: Gloo's threads wake a hundred times a second."""
LATE_SECONDS = 1.0
"""For which a rank waits in a collective until the hub compares what the ranks have entered."""
REPLY_SECONDS, EXIT_SECONDS = 0.7, 3.0
"""For the rank to confirm that it exits, and then to have exited; else it is killed."""
REPORT_SECONDS = 5.0
"""For the hub to say that all other ranks have ended; on a busy host that takes seconds. Then a
rank's death is reported without."""
SIGNALS_FOR_THE_RANK = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)
"""Slurm sends a job's signals to every process of a task."""
INTERRUPTS_TO_HUB = ("interrupt", "paused", "progress", "interrupted")
INTERRUPTS_TO_RANK = ("pause", "interrupt_at", "interrupt_now", "get_progress")
"""Messages about a Ctrl-C, which the watcher only forwards."""


class Watcher:
    """Watches one rank, and ends it when the job has failed."""

    def __init__(self, loop: EventLoop, rank: Connection, hub: Connection, start: Message) -> None:
        self._loop, self._rank_connection, self._hub = loop, rank, hub
        self._rank, self._size, self._host = start["rank"], start["size"], start["host"]
        self._pidfd, self._pid = start["pidfd"], start["pid"]
        self._seen_file, self._crash_file = start["seen"], start.get("crash")
        self._is_hub = start["rank"] == 0
        self._supervised = start["supervised"]
        self._finished = self._reported = self._exit_sent = self._exit_confirmed = False
        """The rank's program has ended; it has reported a failure; we told it to exit; it does."""
        self._writing = False
        """Whether it finishes a file before it exits."""
        self._ended = False
        """Whether the rank's process has ended."""
        self._ended_before = has_ended(self._pidfd)
        """Whether it had ended before this watcher started."""
        self._check_often = self._hub_is_lost = False
        self._ended_ranks: set[int] = set()
        self._failure: Message | None = None
        """The job's first failure."""
        self._awaited_rank: int | None = None
        """The rank that has ended and for which this one waits."""
        self._folders: tuple[str, str | None] | None = None
        """To be removed when the rank has ended: its own, and that which all ranks share."""
        self._abort_text: str | None = None
        """The error with which this rank is to end."""
        self._children: dict[int, int] = {}
        """The process descriptors of the rank's child processes, such as loader workers."""
        self._activity = (0, 0)
        self._asleep = self._idle = False
        """Since the last check: the main thread did not run; all threads hardly ran."""
        self._sequence: int | None = None
        """The sequence number of its barrier in shared memory at the last check."""
        self._idle_checks, self._awaited_checks, self._wait_sent = 0, 0, False
        """Checks for which it has been idle in a collective, and for which it has waited for a rank
        that has ended; whether the hub knows that it waits."""
        self._ticks, self._is_late = 0, False
        """The rank's processor time; whether it has hardly run for LATE_SECONDS."""
        self._late_number = 0
        """In the flight record, of the last collective that was reported to be late."""
        self._record_file: int = start["record"]
        """For `record_format.read`."""
        self._stalls = RankWatch(loop, rank, hub, start)
        hub.send("hello", rank=self._rank, host=self._host, token=start["token"])
        loop.add_reader(rank, self._recv_from_rank)
        loop.add_reader(hub, self._recv_from_hub)
        loop.add_reader(self._pidfd, self._rank_ended)
        loop.call_later(CHECK_SECONDS, self._check_regularly)
        loop.call_later(LATE_SECONDS, self._check_late)

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
                    message.get("is_consequence", False),
                    message.get("awaited_rank"),
                )
            elif message_type == "at_exit":
                self._hub.send("at_exit")
            elif message_type == "exiting":
                self._exit_confirmed, self._writing = True, message["writing"]
            elif message_type == "position":
                self._check_wait(message["wait"])
            elif message_type == "stacks":
                self._stalls.add_stacks(message)
            elif message_type in (*INTERRUPTS_TO_HUB, "collectives"):
                self._hub.send(message_type, **message)
            elif message_type == "remove_folders":
                self._folders = message["own"], message["shared"]
            elif message_type == "detach":
                self._folders = None
                self._hub.send("ended", code=0)
                self._loop.stop()

    def _report_failure(
        self,
        code: int,
        description: str,
        is_consequence: bool = False,
        awaited_rank: int | None = None,
    ) -> None:
        self._reported = True
        failure = failure_fields(self._rank, self._host, code, description, silent=False)
        self._hub.send(
            "failed", **failure, is_consequence=is_consequence, awaited_rank=awaited_rank
        )

    def _rank_ended(self) -> None:
        now = None if self._ended_before else time.monotonic()
        self._loop.remove_reader(self._pidfd)
        self._ended = True
        self._stalls.rank_ended()
        code = exit_code(self._pidfd)
        silent = not (self._reported or self._exit_sent) and (
            code != 0 if code is not None else not self._finished
        )
        if silent:
            failure = failure_fields(self._rank, self._host, code, silent=True)
            self._hub.send("failed", **failure, last_position=self._last_position(code), time=now)
        self._hub.send("ended", code=code)
        if code != 0:
            self._kill_children()
        if silent:
            wait = 0.0 if self._hub_is_lost else REPORT_SECONDS
            self._loop.call_later(wait, self._print_failure)
        elif self._is_hub:
            close_stderr()
        else:
            self._loop.stop()

    def _last_position(self, code: int | None) -> str:
        """The lines that are known about a rank that died silently."""
        crash = read_whole(self._crash_file) if code is not None and code < 0 else ""
        return format_last_words(crash, read_whole(self._seen_file), time.time())

    def _let_rank_exit(self) -> None:
        """Tell the rank to exit, and kill it if it does not."""
        if self._ended or self._exit_sent or self._failure is None:
            return
        if self._supervised and self._failure["host"] == self._host:
            return  # `instep run` on this host does it
        self._exit_sent = True
        code, reason = shell_exit_code(self._failure["code"]), self._failure["headline"]
        self._rank_connection.send("exit", code=code, reason=reason)
        if not (self._reported or self._finished):  # at its end its threads receive nothing
            self._loop.call_later(
                REPLY_SECONDS, lambda: None if self._exit_confirmed else kill(self._pidfd)
            )
        self._loop.call_later(EXIT_SECONDS, self._kill_rank)

    def _kill_rank(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.call_later(WAIT_LIMIT, self._kill_rank)
        else:
            kill(self._pidfd)

    def clean_up(self) -> None:
        """Remove the rank's folders, once it has ended."""
        if self._folders is None or not has_ended(self._pidfd, WAIT_LIMIT):
            return
        import shutil  # few watchers need it

        own, shared = self._folders
        remove_drafts(Path(own, MARKER_NAME))
        shutil.rmtree(own, ignore_errors=True)
        if shared is not None and not [*Path(shared).glob("rank*")]:
            shutil.rmtree(shared, ignore_errors=True)

    def _open_children(self) -> None:
        for pid in descendants(self._pid) - self._children.keys():
            with suppress(OSError):
                self._children[pid] = os.pidfd_open(pid)

    def _kill_children(self) -> None:
        """A loader worker would check only every five seconds whether its rank has ended."""
        for pidfd in self._children.values():
            kill(pidfd)

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
            self._add_ended_ranks({0})
            if self._ended:
                self._print_failure()
        for message in messages or ():
            message_type = message.pop("type")
            if message_type == "ended":
                self._add_ended_ranks(ranks_of(message["ranks"]))
            elif message_type == "failed":
                self._job_failed(message)
            elif message_type == "exit":
                self._let_rank_exit()
            elif message_type == "describe":
                self._stalls.describe(**message)
            elif message_type == "answer":
                self._stalls.handle_reply(message)
            elif message_type == "check_often":
                self._start_frequent_checks()
            elif message_type == "abort" and self._abort_text is None:
                self._abort(message["text"])
            elif message_type == "get_collectives":
                self._hub.send("collectives", steps=recorded_steps(read(self._record_file)))
                if not self._finished:
                    self._rank_connection.send("get_collectives", **message)
            elif message_type == "over":
                self._print_failure()
            elif message_type in INTERRUPTS_TO_RANK:
                self._rank_connection.send(message_type, **message)

    def _job_failed(self, first: Message) -> None:
        self._failure = first
        if self._ended:
            return
        if first["rank"] != self._rank:
            self._rank_connection.send("not_first")
        elif self._abort_text is not None:
            self._rank_connection.send(
                "abort", text=self._abort_text, awaited_rank=self._awaited_rank
            )
        else:
            self._rank_connection.send("first", headline=first["headline"])

    def _print_failure(self) -> None:
        """Print the failure of a rank that died silently, after all others have ended, and end."""
        first = self._failure
        if first is not None and first["silent"] and not self._supervised:
            lost = first["description"].startswith("is lost")
            if first["rank"] == self._rank or (lost and self._is_hub):
                os.write(2, f"{first['headline']}\n{first.get('last_position', '')}".encode())
        self._loop.stop()

    # ------------------------------------------------------------------------ the rank's progress

    def _add_ended_ranks(self, ranks: set[int]) -> None:
        self._ended_ranks |= ranks
        self._start_frequent_checks()

    def _start_frequent_checks(self) -> None:
        if not self._check_often:
            self._check_often = True
            self._loop.call_later(FREQUENT_CHECK_SECONDS, self._check_frequently)

    def _check_regularly(self) -> None:
        if not self._check_often and not self._ended:
            self._check()
            self._loop.call_later(CHECK_SECONDS, self._check_regularly)

    def _check_frequently(self) -> None:
        if not self._ended:
            self._check()
            self._loop.call_later(FREQUENT_CHECK_SECONDS, self._check_frequently)

    def _check_late(self) -> None:
        """Let the hub compare what the ranks have entered if this one waits for long, or sleeps:
        perhaps in a group of torch's own, of which the record does not have the script's calls."""
        if self._ended:
            return
        with suppress(OSError):
            before, self._ticks = self._ticks, read_stat(self._pid).cpu_ticks
            was_idle, self._is_late = self._is_late, self._ticks - before <= IDLE_TICKS
            if self._is_late and not was_idle:
                self._hub.send("is_late")
        entry = read_wait(self._record_file)
        if entry is not None and entry.has_waited(self._late_number, LATE_SECONDS):
            self._late_number = entry.number
            self._hub.send("is_late")
        self._loop.call_later(LATE_SECONDS, self._check_late)

    def _check(self) -> None:
        """Compare the rank's activity with that at the last check; ask for its position."""
        with suppress(OSError):
            switches, ticks = context_switches(self._pid), read_stat(self._pid).cpu_ticks
            self._asleep = switches == self._activity[0]
            self._idle = ticks - self._activity[1] <= IDLE_TICKS
            self._rank_connection.send("get_position")
            self._activity = switches, ticks
            self._open_children()

    def _check_wait(self, wait: Message | None) -> None:
        """The rank's reply: the collective in which its main thread is, or None."""
        previous, self._sequence = self._sequence, None if wait is None else wait.get("sequence")
        waits = self._asleep or (self._idle and previous == self._sequence is not None)
        self._stalls.set_wait(wait["line"] if wait is not None and waits else None)
        if wait is None or not waits:
            self._idle_checks = self._awaited_checks = 0
            if self._wait_sent:
                self._wait_sent = False
                self._hub.send("resumed")
            return
        self._idle_checks = self._idle_checks + 1 if self._idle else 0
        awaited = sorted(self._ended_ranks & ranks_of(wait["members"])) if self._ended_ranks else []
        self._awaited_checks = self._awaited_checks + 1 if awaited else 0
        if self._awaited_checks == 2 and self._abort_text is None:
            verb = "has" if len(awaited) == 1 else "have"
            self._abort(
                f"rank {self._rank} waits in {wait['call']} at {wait['line']} for "
                f"{format_ranks(awaited)}, which {verb} ended.",
                awaited[0],
            )
        elif self._idle_checks >= 2 and not self._wait_sent:
            self._wait_sent = True
            self._hub.send("waits", **wait)

    def _abort(self, text: str, awaited_rank: int | None = None) -> None:
        self._abort_text, self._awaited_rank = text, awaited_rank
        self._report_failure(1, "waits in vain", True, awaited_rank)


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
        hub = start_hub(loop, start)
    else:
        reached = connect(start["hosts"], start["port"])
        if reached is None:
            return
        hub = reached
    watcher = Watcher(loop, rank, Connection(hub), start)
    watcher.handle(others)
    loop.run()
    watcher.clean_up()
