"""Which run of the script is under way, and about how long the rest will take, on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import TextIO

WHOLE = "1 process"
AGAIN = "1 process again, for its gradients"
FULL = "1 process without autocast, for its gradients"
PLAIN = "plain Python, its first steps"
NOISE = "1 process against itself, for the script's own noise"
ROUNDING = "1 process with other rounding, since a gradient is in doubt"
_TICK = 1.0
"""Seconds between two updates of the line on a terminal."""


def pinned_steps(n: int, autocast: bool = True) -> str:
    """The title of the run of `n` ranks from the parameters of one process."""
    without = "" if autocast else ", without autocast"
    return f"{_processes(n)}, steps from the parameters of 1 process{without}"


def all_steps(n: int) -> str:
    """The title of the run of `n` ranks on their own."""
    return f"{_processes(n)}, all steps"


class RunProgress:
    """Says which run is under way. On a terminal it is one line, which counts the seconds."""

    def __init__(
        self,
        sizes: Sequence[int],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        expected: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            sizes: the numbers of ranks other than 1.
            stream: where to write; None: stderr.
            clock: the time in seconds.
            expected: the titles of the runs; None: those of a comparison with one process.
        """
        several = [title(n) for n in sizes for title in (pinned_steps, all_steps)]
        whole = [WHOLE, AGAIN, PLAIN, NOISE, *several]
        self._expected = whole if expected is None else [*expected]
        self._stream = stream or sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._title = ""
        self._number = 0
        self._began = 0.0
        self._longest: dict[bool, float] = {}  # by whether all steps are made
        self._closed = Event()
        self._ticker: Thread | None = None

    def start(self, title: str) -> None:
        """Say that this run starts; the one before has ended."""
        if self._title:
            seconds, whole = self._clock() - self._began, _makes_all_steps(self._title)
            self._longest[whole] = max(seconds, self._longest.get(whole, 0.0))
        if title in self._expected:
            del self._expected[: self._expected.index(title) + 1]
        self._title, self._began = title, self._clock()
        self._number += 1
        if not self._terminal:
            print(f"instep verify: {self.line()}", file=self._stream, flush=True)
            return
        self.show()
        if self._ticker is None:
            self._ticker = Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def line(self) -> str:
        """The number of this run, the seconds that are left, and what it is.

        Nothing is said of the seconds in the first run, or if this one takes longer than others of
        its kind.
        """
        times, seconds = [], self._clock() - self._began
        if self._terminal:
            times.append(f"{int(seconds)} s")
        if self._longest and seconds <= (own := self._estimate(self._title)):
            left = own - seconds + sum(map(self._estimate, self._expected))
            times.append(f"{_roughly(left)} left")
        number = f"run {self._number} of {self._number + len(self._expected)}"
        if times:
            number = f"{number} ({', '.join(times)})"
        return f"{number}: {self._title}"

    def show(self) -> None:
        """Write the line anew on the terminal."""
        line = f"instep verify: {self.line()}"[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r\033[K{line}")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Write a line of its own."""
        print(f"{self._blank()}instep verify: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """End: the terminal's line is removed."""
        self._closed.set()
        if self._ticker is not None:
            self._ticker.join()
            self._stream.write(self._blank())
            self._stream.flush()

    def _blank(self) -> str:
        return "\r\033[K" if self._terminal else ""

    def _tick(self) -> None:
        while not self._closed.wait(_TICK):
            self.show()

    def _estimate(self, title: str) -> float:
        """The longest run of this kind; before there is one, that of the other kind."""
        known = self._longest.get(_makes_all_steps(title))
        return max(self._longest.values()) if known is None else known


def _makes_all_steps(title: str) -> bool:
    return title in (WHOLE, NOISE) or title.endswith("all steps")


def _processes(n: int) -> str:
    return f"{n} process{'es' * (n != 1)}"


def _roughly(seconds: float) -> str:
    """Seconds up to two minutes, then minutes, rounded up."""
    if seconds <= 120:
        return f"about {max(1, round(seconds))} s"
    return f"about {-int(-seconds // 60)} min"
