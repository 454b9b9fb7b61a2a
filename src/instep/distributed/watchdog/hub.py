"""The hub: where the watchers of a job meet, in the process of rank 0's watcher."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from functools import partial
from hmac import compare_digest

from instep.distributed.watchdog import deadlock, first_failure
from instep.distributed.watchdog.connection import Line, Said
from instep.distributed.watchdog.event_loop import Loop
from instep.distributed.watchdog.interrupt_agreement import Agreement
from instep.distributed.watchdog.messages import is_sound
from instep.process.exit_status import describe_early_exit, describe_exit, format_failure

NEWS = 0.1
"""Seconds after the first news of a failure until the first failure is named. A death is seen later
than it happens, and a peer may have complained in between."""
LAST_WORDS = 2.0
"""Seconds that the rank which failed has to print, clean up and go, before the others are ended."""
SEEN = 0.2
"""Seconds after its end until the others are ended: their launcher shall see that one first."""
OTHERS = 0.9
"""Seconds that the others have to go."""
ASKED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""How a rank ends that was asked to."""
STUCK, STUCK_AT_THE_END = 3.0, 1.0
"""Seconds until ranks that seem stuck are looked at again; the second where one of them has come
to the end of its script, so that it begins no collective any more."""
GREETING = 5.0
"""Seconds within which whoever has called says who it is."""
CALLERS = 64
"""Those who have called and not yet said who they are; with one more, the first is hung up on."""


class Hub:
    """Hears what every watcher sees, names the first failure, and lets the others go after it."""

    def __init__(self, loop: Loop, size: int, listener: socket.socket, token: str) -> None:
        self._loop, self._size, self._token = loop, size, token
        self._listener = listener
        self._callers: dict[Line, None] = {}
        """Who has called and not yet said who it is, in this order."""
        self._lines: dict[int, Line] = {}
        self._hosts: set[str] = set()
        self._ended: dict[int, int | None] = {}
        """The exit codes of the ranks that have ended."""
        self._news: list[Said] = []
        """What was heard of failures before one was named the first."""
        self._first: Said | None = None
        self._finished: set[int] = set()
        """The ranks that have come to the end of their program."""
        self._postponed = 0
        self._left = self._concluded = False
        """Whether the others were told to go; whether nothing is left to be said."""
        self._agreement = Agreement(loop, self)
        """About a Ctrl-C."""
        self._waits: dict[int, Said] = {}
        """In which collective each rank waits that does not get on."""
        listener.setblocking(False)
        loop.on(listener, self._answer)

    def welcome(self, end: socket.socket) -> None:
        """A watcher has called, or somebody else."""
        line = Line(end)
        self._callers[line] = None
        self._loop.on(line, partial(self._hear_hello, line))
        self._loop.after(GREETING, partial(self._refuse, line))
        if len(self._callers) > CALLERS:
            self._refuse(next(iter(self._callers)))

    def _answer(self) -> None:
        with suppress(OSError):  # the caller has gone again
            self.welcome(self._listener.accept()[0])

    def _refuse(self, line: Line) -> None:
        """Hang up on a caller that has not said who it is."""
        if line in self._callers:
            del self._callers[line]
            self._loop.off(line)
            line.hang_up()

    def _hear_hello(self, line: Line) -> None:
        try:
            said = line.hear()
        except OSError:
            said = None
        if said == []:
            return  # the rest of it is to come
        if said is None or not self._is_of_this_job(said[0]):
            self._refuse(line)
            return
        del self._callers[line]
        self._loop.off(line)
        rank, host = said[0]["rank"], said[0]["host"]
        self._lines[rank] = line
        self._hosts.add(host)
        self._loop.on(line, partial(self._hear, rank, host))
        for ended in self._ended:
            line.say("ended", rank=ended)
        if self._first is not None:
            line.say("failed", **self._first)
        for words in said[1:]:
            self._take(rank, words)

    def _is_of_this_job(self, said: Said) -> bool:
        """Whether a watcher says so whose rank has no line yet."""
        return (
            said["word"] == "hello"
            and is_sound(said, self._size)
            and compare_digest(said["token"].encode(errors="replace"), self._token.encode())
            and said["rank"] not in self._lines
        )

    def _hear(self, rank: int, host: str) -> None:
        try:
            said = self._lines[rank].hear()
        except OSError as error:
            said = None
            what = f"is lost: its host {host} does not answer ({error.strerror})"
            self._fail(failure(rank, host, 1, what, silent=True))
        if said is None or not all(is_sound(words, self._size, rank) for words in said):
            self._loop.off(self._lines[rank])
            self._lines.pop(rank).hang_up()
            self._end(rank, None)
            if set(self._lines) <= {0} and 0 in self._ended:
                self._nobody_is_left()  # or ever came
        else:
            for words in said:
                self._take(rank, words)

    def _take(self, rank: int, said: Said) -> None:
        word = said.pop("word")
        if word == "ended":
            self._end(rank, said["code"])
        elif word == "finished":
            self._finished.add(rank)
        elif word == "exits":
            self.tell_all("closely")
        elif word == "failed":
            self._fail(said)
        elif word == "waits":
            self._waits[rank] = said
            self._suspect()
        elif word == "moves":
            self._waits.pop(rank, None)
        else:
            self._agreement.take(rank, word, said)

    def tell_all(self, word: str, **facts: object) -> None:
        """To every watcher."""
        for line in self._lines.values():
            line.say(word, **facts)

    def going(self) -> set[int]:
        """The ranks whose programs are under way."""
        return self._lines.keys() - self._ended.keys() - self._finished

    def all_came(self) -> bool:
        """Whether every rank has met the others."""
        return len(self._lines.keys() | self._ended.keys()) == self._size

    def give_up(self, text: str) -> None:
        """End the job."""
        speaker = self._lines.get(min(self.going(), default=0))
        if self._first is None and not self._news and speaker is not None:
            speaker.say("verdict", text=text)

    # ------------------------------------------------------------------------------- failures

    def _fail(self, failure: Said) -> None:
        self._news.append(failure)
        if len(self._news) == 1:
            self._loop.after(NEWS, self._name_the_first)

    def _name_the_first(self) -> None:
        silent = [failure for failure in self._news if failure["silent"]]
        if len(silent) == self._size and {failure["code"] for failure in silent} <= ASKED:
            self._over()  # the whole job was told to end, and whoever did that knows
            return
        leaving = self._finished - self._ended.keys()  # did one fail, so that a peer complained?
        if (not self.all_came() or (leaving and not silent)) and self._postponed < 5:
            self._postponed += 1
            self._loop.after(NEWS, self._name_the_first)
            return
        self._first = first_failure.first(self._news)
        self._first["headline"] = self._headline(self._first)
        self.tell_all("failed", **self._first)
        if self._first["rank"] in self._ended:
            self._let_the_others_go()
        else:
            self._loop.after(LAST_WORDS, self._let_the_others_go)

    def _headline(self, first: Said) -> str:
        """Of a rank that waited for one which had ended, it names the latter."""
        rank, missed = first["rank"], first.get("missed")
        where = f" on {first['host']}" if len(self._hosts) > 1 else ""
        what = first["what"] + where
        if missed is not None and (missed in self._finished or self._ended.get(missed) == 0):
            what, rank = describe_early_exit(rank), missed
        others = set(range(self._size)) - {rank, *first.get("with", ())}
        return format_failure(
            rank, self._size, what, others & self._finished, others - self._finished
        )

    def _let_the_others_go(self) -> None:
        if not self._left:
            self._left = True
            self.tell_all("leave")
            self._loop.after(OTHERS, self._over)

    def _end(self, rank: int, code: int | None) -> None:
        if rank in self._ended:
            return
        self._ended[rank] = code
        self.tell_all("ended", rank=rank)
        if self._first is not None and rank == self._first["rank"]:
            self._loop.after(SEEN, self._let_the_others_go)
        if len(self._ended) == self._size:
            self._nobody_is_left()

    def _nobody_is_left(self) -> None:
        if self._first is not None or not self._news:  # else one is about to be named
            self._over()

    def _over(self) -> None:
        if self._concluded:
            return
        self._concluded = True
        if self._first is not None:
            self.tell_all("over")
        if self._first is None or 0 not in self._lines:
            self._loop.stop()  # else rank 0's watcher, in this loop, does, when it has reported

    # ---------------------------------------------------------------------------- divergences

    def _suspect(self) -> None:
        if suspects := deadlock.stuck(self._waits):
            seen = {rank: self._waits[rank] for rank in suspects}
            at_the_end = any(wait["op"] == "exit" for wait in seen.values())
            patience = STUCK_AT_THE_END if at_the_end else STUCK
            self._loop.after(patience, partial(self._convict, seen))

    def _convict(self, seen: dict[int, Said]) -> None:
        """They are stuck if they still wait as they did."""
        if (
            self._first is None
            and not self._news
            and all(self._waits.get(rank) is wait for rank, wait in seen.items())
        ):
            text = "the ranks wait for each other in different collectives:\n"
            speaker = self._lines.get(min(seen))
            if speaker is not None:
                speaker.say("verdict", text=text + deadlock.described(seen))


def failure(
    rank: int, host: str, code: int | None, what: str | None = None, *, silent: bool
) -> Said:
    """The news that a rank failed; `silent` if it could not say so itself."""
    what = describe_exit(code) if what is None else what
    return {"rank": rank, "host": host, "code": code, "what": what, "silent": silent}
