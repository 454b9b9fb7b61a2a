"""Failure: what a rank that fails leaves behind, and which of several failures came first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from instep.process.exit_status import (
    describe_early_exit,
    describe_exit,
    format_failure,
    shell_exit_code,
)

DETECTION_DELAY = 0.1
"""Seconds. A death is seen later than it happens, and a peer may have complained in between: a
rank that vanished without a word is taken to have failed this much before it was seen to."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    time: float
    """When, in seconds since the epoch."""
    code: int
    """The exit code; -n for signal n."""
    raised: bool = False
    """Whether an exception escaped from the script."""
    text: str = ""
    """Its traceback, or the message of its SystemExit."""
    lost_host: str = ""
    """The host whose supervisor does not answer any more, if that is the failure."""
    follows: bool = False
    """Whether it only says that another rank failed, left, or did something else."""
    missed: int | None = None
    """The rank that had ended while this one waited for it, if that is the failure."""
    waiting: int | None = None
    """The rank that waited for this one, which had ended with exit code 0."""

    def write(self, path: Path) -> None:
        """Leave it at `path`, whole or not at all."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="ascii")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """What a rank left at `path`; None when it left nothing."""
        try:
            return cls(**json.loads(path.read_text(encoding="ascii")))
        except FileNotFoundError:
            return None

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + n for signal n."""
        return shell_exit_code(self.code)

    def __str__(self) -> str:
        """What happened, as a predicate."""
        if self.lost_host:
            return f"was lost with its host {self.lost_host}"
        if self.waiting is not None:
            return describe_early_exit(self.waiting)
        if self.code < 0:
            return describe_exit(self.code)
        return f"failed (exit code {self.code})" if self.raised else describe_exit(self.code)


@dataclass(frozen=True)
class RankExit:
    """How the process of one rank was seen to end."""

    rank: int
    time: float
    """When, in seconds since the epoch."""
    code: int
    """The exit code; -n for signal n."""
    stopped: bool
    """Whether the supervisor had already told it to."""
    told: str = ""
    """What else is known of how it ended, as lines."""
    left: bool = False
    """Whether it had come to the end of its program, with exit code 0."""

    @property
    def in_peace(self) -> bool:
        """Whether nobody made it end, and its exit code is 0, or was to be."""
        return self.left or (self.code == 0 and not self.stopped)


def first_failure(ends: Iterable[RankExit], written: Sequence[Failure]) -> Failure | None:
    """The failure that the others followed from; None when nobody failed."""
    spoke = {failure.rank for failure in written}
    ended = {end.rank: end for end in ends}
    silent = [end for end in ended.values() if end.code != 0 and end.rank not in spoke]
    unasked = [end for end in silent if not end.stopped]
    candidates = [
        *written,
        *(
            Failure(end.rank, end.time - DETECTION_DELAY, end.code, text=end.told)
            for end in unasked
        ),
    ] or [Failure(end.rank, end.time, end.code, text=end.told) for end in silent]
    first = min(candidates, key=lambda each: (each.follows, each.time, each.rank), default=None)
    missed = ended.get(first.missed) if first and first.missed is not None else None
    if first is None or missed is None:
        return first
    if missed.code not in (0, -signal.SIGTERM):  # it died before anybody was told to end
        return Failure(missed.rank, first.time, missed.code, text=missed.told)
    if not missed.in_peace:
        return first
    text = missed.told + first.text
    return replace(first, rank=missed.rank, missed=None, waiting=first.rank, text=text)


def format_report(first: Failure, ends: Sequence[RankExit], size: int) -> str:
    """What the user reads last: who of `size` ranks failed, how, what became of the others."""
    others = [end for end in ends if end.rank != first.rank]
    finished = [end.rank for end in others if end.code == 0 and not end.stopped]
    stopped = [end.rank for end in others if end.rank not in finished]
    sentence = format_failure(first.rank, size, str(first), finished, stopped)
    text = first.text.rstrip(os.linesep)
    return "\n".join([sentence, *([text] if text else [])]) + "\n"
