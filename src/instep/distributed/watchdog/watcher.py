"""The watcher of one rank: a program of the standard library only, which starts in 20 ms.

It is started by the rank (`attendant`) with one argument, the file descriptor of their line. It
outlives the rank only to say how it ended, a second or two; that of rank 0, which is the hub, stays
until all have ended.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from instep.distributed.watchdog.connection import Line, Said
from instep.distributed.watchdog.event_loop import Loop
from instep.distributed.watchdog.hub import Hub, failure
from instep.process.exit_status import format_failure, format_ranks, shell_exit_code
from instep.process.last_position import format_crash, format_position
from instep.process.pending_writes import MARKER_NAME, WAIT_LIMIT, remove_drafts
from instep.process.procfs import (
    context_switches,
    descendants,
    exit_code,
    has_ended,
    kill,
    read_stat,
    set_process_name,
)

LOOK, LOOK_CLOSELY = 2.5, 0.3
"""Seconds between two looks at the rank; the second once any rank has come to its end."""
IDLE = 3
"""Clock ticks between two looks that are no work: Gloo's threads wake a hundred times a second."""
OBEY, GO = 0.7, 3.0
"""Seconds that the rank has to say that it leaves, and then to be gone; else it is killed."""
REPORT = 2.0
"""Seconds in which the hub must have said how a failure ended."""
MEANT_FOR_THE_RANK = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)
"""Slurm sends a job's signals to every process of a task."""
INTERRUPTED = ("interrupt", "halted", "point", "taken")
INTERRUPTING = ("halt", "after", "here", "point")
"""Words of a rank to the hub, and of the hub to all ranks, when there was a Ctrl-C."""
LOST = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A host that does not answer for 30 seconds is lost."""


class Watcher:
    """Watches one rank, and ends it when the job has failed."""

    def __init__(self, loop: Loop, rank: Line, hub: Line, said: Said) -> None:
        self._loop, self._line, self._hub = loop, rank, hub
        self._rank, self._size, self._host = said["rank"], said["size"], said["host"]
        self._pidfd, self._pid = said["pidfd"], said["pid"]
        self._seen_file, self._crash = said["seen"], said.get("crash")
        self._is_hub = said["rank"] == 0
        self._supervised = said["supervised"]
        self._finished = self._spoke = self._leaving = self._obeyed = False
        """The rank said that its program is over; that it failed; we told it to leave; it does."""
        self._writing = False
        """Whether it finishes a file before it leaves."""
        self._over = False
        """The rank's process has ended."""
        self._came_late = has_ended(self._pidfd)
        """Whether it had ended before this watcher watched."""
        self._closely = False
        """Whether it looks at the rank often."""
        self._ended: set[int] = set()
        """The ranks that have ended."""
        self._failure: Said | None = None
        """The job's first."""
        self._missed: int | None = None
        """The rank for which it waits in vain."""
        self._folders: tuple[str, str | None] | None = None
        """What is to be removed when the rank has ended: its own, and what all ranks share."""
        self._verdict: str | None = None
        """What the rank is to die of, as we have seen."""
        self._children: dict[int, int] = {}
        """What the rank has started, such as loader workers: the process descriptor of each."""
        self._seen = (0, 0)
        self._asleep = self._idle = False
        """Since the look before: whether its main thread did not run; whether none did, nearly."""
        self._sequence: int | None = None
        """The sequence number of its barrier in shared memory at the last look."""
        self._still, self._waits_in_vain, self._told_wait = 0, 0, False
        """For how many looks; for how many looks for one that has ended; whether the hub knows."""
        hub.say("hello", rank=self._rank, host=self._host, token=said["token"])
        loop.on(rank, self._rank_said)
        loop.on(hub, self._hub_said)
        loop.on(self._pidfd, self._rank_ended)
        loop.after(LOOK, self._look_sometimes)

    # ------------------------------------------------------------------------------ the rank

    def _rank_said(self) -> None:
        said = self._line.hear()
        if said is None:
            self._loop.off(self._line)
        self.take(said or ())

    def take(self, said: Iterable[Said]) -> None:
        """What the rank says."""
        for words in said:
            if words["word"] == "finished":
                self._finished = True
                self._hub.say("finished")
            elif words["word"] == "failed":
                what = f"failed (exit code {words['code']})"
                self._fail(words["code"], what, words.get("follows", False), words.get("missed"))
            elif words["word"] == "exits":
                self._hub.say("exits")
            elif words["word"] == "leaving":
                self._obeyed, self._writing = True, words["writing"]
            elif words["word"] == "stands":
                self._judge(words["wait"])
            elif words["word"] in INTERRUPTED:
                self._hub.say(**words)
            elif words["word"] == "remove":
                self._folders = words["own"], words["shared"]
            elif words["word"] == "retired":
                self._folders = None
                self._hub.say("ended", code=0)
                self._loop.stop()

    def _fail(self, code: int, what: str, follows: bool = False, missed: int | None = None) -> None:
        self._spoke = True
        news = failure(self._rank, self._host, code, what, silent=False)
        self._hub.say("failed", **news | {"follows": follows, "missed": missed})

    def _rank_ended(self) -> None:
        moment = None if self._came_late else time.monotonic()
        self._loop.off(self._pidfd)
        self._over = True
        code = exit_code(self._pidfd)
        silent = not (self._spoke or self._leaving) and (
            code != 0 if code is not None else not self._finished
        )
        if silent:
            news = failure(self._rank, self._host, code, silent=True)
            told = {"told": self._last_words(code), "moment": moment}
            self._hub.say("failed", **news | told)
        self._hub.say("ended", code=code)
        if code != 0:
            self._end_children()
        if silent:
            self._loop.after(REPORT, self._loop.stop)
        elif self._is_hub:
            _close_stderr()
        else:
            self._loop.stop()

    def _last_words(self, code: int | None) -> str:
        """What is known of how the rank ended, as lines."""
        crash = _text_of(self._crash) if code is not None and code < 0 else ""
        return format_crash(crash) or format_position(_text_of(self._seen_file), time.time())

    def _leave(self) -> None:
        """Let the rank go, or make it."""
        if self._over or self._leaving or self._failure is None:
            return
        if self._supervised and self._failure["host"] == self._host:
            return  # `instep run` on this host sees to it
        self._leaving = True
        self._line.say(
            "leave", code=shell_exit_code(self._failure["code"]), why=self._failure["headline"]
        )
        if not (self._spoke or self._finished):  # who ends already, its threads hear no more
            self._loop.after(OBEY, lambda: None if self._obeyed else kill(self._pidfd))
        self._loop.after(GO, self._end_rank)

    def _end_rank(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.after(WAIT_LIMIT, self._end_rank)
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

    def _note_children(self) -> None:
        for pid in descendants(self._pid) - self._children.keys():
            with suppress(OSError):
                self._children[pid] = os.pidfd_open(pid)

    def _end_children(self) -> None:
        """A loader worker would look for its rank only every five seconds."""
        for pidfd in self._children.values():
            kill(pidfd)

    # ------------------------------------------------------------------------------- the hub

    def _hub_said(self) -> None:
        try:
            said = self._hub.hear()
        except OSError as error:
            said = None
            what = f"is lost: its host does not answer ({error.strerror})"
            self._failure = failure(0, "", 1, what, silent=True)
            self._failure["headline"] = format_failure(0, self._size, what, (), (self._rank,))
            self._leave()
        if said is None:
            self._loop.off(self._hub)
            self._has_ended(0)
            if self._over:
                self._loop.stop()
        for words in said or ():
            word = words.pop("word")
            if word == "ended":
                self._has_ended(words["rank"])
            elif word == "failed":
                self._job_failed(words)
            elif word == "leave":
                self._leave()
            elif word == "closely":
                self._begin_to_look_closely()
            elif word == "verdict" and self._verdict is None:
                self._convict(words["text"])
            elif word == "over":
                self._report()
            elif word in INTERRUPTING:
                self._line.say(word, **words)

    def _job_failed(self, first: Said) -> None:
        self._failure = first
        if self._over:
            return
        if first["rank"] != self._rank:
            self._line.say("hush")
        elif self._verdict is not None:
            self._line.say("die", text=self._verdict, missed=self._missed)
        else:
            self._line.say("told", headline=first["headline"])

    def _report(self) -> None:
        """A rank that died silently is named by its watcher, after all others have gone."""
        first = self._failure
        if first is not None and first["silent"] and not self._supervised:
            lost = first["what"].startswith("is lost")
            if first["rank"] == self._rank or (lost and self._is_hub):
                os.write(2, f"{first['headline']}\n{first.get('told', '')}".encode())
        self._loop.stop()

    # ------------------------------------------------------------------------ is it getting on

    def _has_ended(self, rank: int) -> None:
        self._ended.add(rank)
        self._begin_to_look_closely()

    def _begin_to_look_closely(self) -> None:
        if not self._closely:
            self._closely = True
            self._loop.after(LOOK_CLOSELY, self._look_closely)

    def _look_sometimes(self) -> None:
        if not self._closely and not self._over:
            self._look()
            self._loop.after(LOOK, self._look_sometimes)

    def _look_closely(self) -> None:
        if not self._over:
            self._look()
            self._loop.after(LOOK_CLOSELY, self._look_closely)

    def _look(self) -> None:
        """What it did since the last look, and where it stands."""
        with suppress(OSError):
            switches, ticks = context_switches(self._pid), read_stat(self._pid).cpu_ticks
            self._asleep = switches == self._seen[0]
            self._idle = ticks - self._seen[1] <= IDLE
            self._line.say("where")
            self._seen = switches, ticks
            self._note_children()

    def _gets_on(self) -> None:
        self._still = self._waits_in_vain = 0
        if self._told_wait:
            self._told_wait = False
            self._hub.say("moves")

    def _judge(self, wait: Said | None) -> None:
        """It stands in this collective or in none."""
        before, self._sequence = self._sequence, None if wait is None else wait.get("sequence")
        waited = self._asleep or (self._idle and before == self._sequence is not None)
        if wait is None or not waited:
            self._gets_on()
            return
        self._still = self._still + 1 if self._idle else 0
        gone = sorted(self._ended & set(wait["members"]))
        self._waits_in_vain = self._waits_in_vain + 1 if gone else 0
        if self._waits_in_vain == 2 and self._verdict is None:
            where = f"{wait['call']} at {wait['line']}"
            verb = "has" if len(gone) == 1 else "have"
            self._convict(
                f"rank {self._rank} waits in {where} for {format_ranks(gone)}, which {verb} ended.",
                gone[0],
            )
        elif self._still >= 2 and not self._told_wait:
            self._told_wait = True
            self._hub.say("waits", **wait)

    def _convict(self, text: str, missed: int | None = None) -> None:
        self._verdict, self._missed = text, missed
        self._fail(1, "waits in vain", True, missed)


def _text_of(fd: int | None) -> str:
    if fd is None:
        return ""
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


def _close_stderr() -> None:
    """The launcher waits for the end of what its ranks print."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)


def _hub_line(said: Said) -> socket.socket | None:
    """To the hub of another process. None when it cannot be reached."""
    for host in said["hosts"]:
        with suppress(OSError):
            end = socket.create_connection((host, said["port"]), timeout=5)
            end.settimeout(None)
            if not said["one_host"]:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in LOST.items():
                    end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            return end
    return None


def main(fd: str) -> None:
    """The program: the rank's first words say whom to watch."""
    for number in MEANT_FOR_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    set_process_name("instep-watch")
    line = Line(socket.socket(fileno=int(fd)))
    heard = line.hear()
    if not heard:
        return
    said = heard[0]
    loop = Loop()
    if said["rank"] == 0:
        listener = socket.socket(fileno=said["listener"])
        end, other = socket.socketpair()
        Hub(loop, said["size"], listener, said["token"]).welcome(other)
    else:
        reached = _hub_line(said)
        if reached is None:
            return
        end = reached
    watcher = Watcher(loop, line, Line(end), said)
    watcher.take(heard[1:])
    loop.run()
    watcher.clean_up()
