"""Failure: what a rank that fails leaves behind, and which of several failures came first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from instep.fates import headline, how_it_ended, shell_code

SIGHT = 0.1
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
        return shell_code(self.code)

    def __str__(self) -> str:
        """What happened, as a predicate."""
        if self.lost_host:
            return f"was lost with its host {self.lost_host}"
        return f"failed (exit code {self.code})" if self.raised else how_it_ended(self.code)


@dataclass(frozen=True)
class End:
    """How the process of one rank was seen to end."""

    rank: int
    time: float
    """When, in seconds since the epoch."""
    code: int
    """The exit code; -n for signal n."""
    stopped: bool
    """Whether the supervisor had already told it to."""


def first_failure(ends: Iterable[End], written: Sequence[Failure]) -> Failure | None:
    """The failure that the others followed from; None when nobody failed."""
    spoke = {failure.rank for failure in written}
    silent = [end for end in ends if end.code != 0 and end.rank not in spoke]
    unasked = [end for end in silent if not end.stopped]
    candidates = [
        *written,
        *(Failure(end.rank, end.time - SIGHT, end.code) for end in unasked),
    ] or [Failure(end.rank, end.time, end.code) for end in silent]
    return min(candidates, key=lambda failure: (failure.time, failure.rank), default=None)


def report(first: Failure, ends: Sequence[End], size: int) -> str:
    """What the user reads last: who of `size` ranks failed, how, what became of the others."""
    finished = [end.rank for end in ends if end.code == 0 and not end.stopped]
    stopped = [end.rank for end in ends if end.rank not in (first.rank, *finished)]
    sentence = headline(first.rank, size, str(first), finished, stopped)
    text = first.text.rstrip(os.linesep)
    return "\n".join([sentence, *([text] if text else [])]) + "\n"
