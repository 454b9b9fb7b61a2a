"""The record that a failing rank leaves behind, and the choice of the first of several failures."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from instep.process import PACKAGE_FOLDER, is_script_file
from instep.process.exit_status import (
    UNKNOWN_RANK,
    describe_early_exit,
    describe_exit,
    format_failure,
    format_ranks,
    format_stopped,
    group_ranks,
    shell_exit_code,
)

DETECTION_DELAY = 0.5
"""Seconds. A death is seen later than it happens (a busy host takes time to free the memory of a
process), and a peer may have complained in between: a rank that ended and reported nothing is taken
to have failed this much before it was seen to."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    time: float
    """In seconds since the epoch."""
    code: int
    """The exit code; -n for signal n."""
    raised: bool = False
    """Whether an exception escaped from the script."""
    text: str = ""
    """Its traceback, or the message of its SystemExit."""
    lost_host: str = ""
    """The host whose supervisor does not answer any more, if that is the failure."""
    is_consequence: bool = False
    """Whether it only says that another rank failed, left, or did something else."""
    awaited_rank: int | None = None
    """The rank that had ended while this one waited for it, if that is the failure; perhaps
    UNKNOWN_RANK."""
    waiting_rank: int | None = None
    """The rank that waited for this one, which had ended with exit code 0."""
    is_as_of_rank_0: bool = False
    """Whether rank 0 has failed in the same way, and reports it."""

    def write(self, path: Path) -> None:
        """Write it to `path`, whole or not at all."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="ascii")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """The failure that a rank wrote to `path`; None where there is none."""
        try:
            return cls(**json.loads(path.read_text(encoding="ascii")))
        except FileNotFoundError:
            return None

    @property
    def exit_code(self) -> int:
        """128 + n for signal n."""
        return shell_exit_code(self.code)

    def __str__(self) -> str:
        """The failure as a predicate."""
        if self.lost_host:
            return f"was lost with its host {self.lost_host}"
        if self.waiting_rank is not None:
            return describe_early_exit(self.waiting_rank)
        if self.raised and self.code >= 0:
            return f"failed (exit code {self.code})"
        return describe_exit(self.code)


@dataclass(frozen=True)
class RankExit:
    """How the process of one rank was seen to end."""

    rank: int
    time: float
    """In seconds since the epoch."""
    code: int
    """The exit code; -n for signal n."""
    stopped: bool
    """Whether the supervisor had told it to end, by a signal that may be the reason."""
    details: str = ""
    """Lines about the rank's last position."""
    finished: bool = False
    """Whether it had come to the end of its program, with exit code 0."""
    monotonic: float = 0.0
    """`time`, as `time.monotonic` of its host has it."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.finished or (self.code == 0 and not self.stopped)


def first_failure(exits: Iterable[RankExit], written: Sequence[Failure]) -> Failure | None:
    """The failure that caused the others; None where no rank failed."""
    reported = {failure.rank for failure in written}
    by_rank = {each.rank: each for each in exits}
    silent = [each for each in by_rank.values() if each.code != 0 and each.rank not in reported]
    unasked = [each for each in silent if not each.stopped]
    candidates = [
        *written,
        *(
            Failure(each.rank, each.time - DETECTION_DELAY, each.code, text=each.details)
            for each in unasked
        ),
    ] or [Failure(each.rank, each.time, each.code, text=each.details) for each in silent]
    first = min(candidates, key=_precedence, default=None)
    if first is None or first.awaited_rank is None:
        return first
    awaited = by_rank.get(first.awaited_rank)
    if first.awaited_rank == UNKNOWN_RANK:
        ended = [each for each in by_rank.values() if each.succeeded]
        awaited = min(ended, key=lambda each: (each.time, each.rank), default=None)
    if awaited is None:
        return first
    if awaited.code not in (0, -signal.SIGTERM):  # it died before any rank was told to end
        return Failure(awaited.rank, first.time, awaited.code, text=awaited.details)
    if not awaited.succeeded:
        return first
    text = awaited.details + first.text
    return replace(first, rank=awaited.rank, awaited_rank=None, waiting_rank=first.rank, text=text)


def _precedence(failure: Failure) -> tuple[bool, bool, float, int]:
    """The first failure has the lowest one. A consequence without a text is another rank's, too."""
    has_text = not failure.is_consequence or bool(failure.text)
    return failure.is_consequence, not has_text, failure.time, failure.rank


_KILLED = "SIGKILL nearly always means that the host's memory was full."


def format_interrupt(
    number: signal.Signals, first: Failure | None, exits: Iterable[RankExit]
) -> str:
    """One line about a job that was asked to end by this signal; `first`: the first rank's end."""
    text = "" if first is None else first.text
    frames = re.findall(r'File "(.+)", line (\d+)', text)
    outside = [frame for frame in frames if not frame[0].startswith(PACKAGE_FOLDER)]
    own = [frame for frame in frames if is_script_file(frame[0])]
    seen = [f"{file}:{line}" for file, line in own or outside]
    seen += re.findall(r"It (?:was last seen|left) at (.+?:\d+)[,.]", text)
    what = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
    place = f" at {seen[-1]}" if seen else ""
    codes = group_ranks({each.rank: each.code for each in exits if each.code != 0})
    if codes and min(codes) > 0:
        ends = [f"; {format_ranks(ranks)} {describe_exit(code)}" for code, ranks in codes.items()]
        return f"instep: {what}{place}{''.join(ends)}\n"
    stopped = format_stopped(rank for ranks in codes.values() for rank in ranks)
    return f"instep: {what}{place}{stopped}\n"


def format_report(
    first: Failure,
    exits: Sequence[RankExit],
    size: int,
    host: str = "",
    written: Sequence[Failure] = (),
) -> str:
    """The last lines that the user reads: the first failure, and what became of the others.

    `host`: that of the first failure, where the job has several; `written`: what the ranks wrote.
    """
    others = [each for each in exits if each.rank != first.rank]
    finished = [each.rank for each in others if each.code == 0 and not each.stopped]
    alike = {each.rank for each in written if each.is_as_of_rank_0 and first.rank == 0}
    stopped = [each.rank for each in others if each.rank not in {*finished, *alike}]
    adds_host = host and not first.lost_host and first.waiting_rank is None
    what = f"{first} on {host}" if adds_host else str(first)
    line = format_failure(first.rank, size, what, finished, stopped, alike)
    text = first.text.rstrip(os.linesep)
    if first.code == -signal.SIGKILL and not any(
        each.rank == first.rank and each.stopped for each in exits
    ):
        text = f"{text}\n{_KILLED}".lstrip()
    return "\n".join([line, *([text] if text else [])]) + "\n"
