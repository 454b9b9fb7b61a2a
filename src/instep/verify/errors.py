"""Errors of scripts for which `instep verify` can give no verdict."""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import VerificationError


def _at(n: int) -> str:
    return f"at n = {n}" if n else "in plain Python"


class ScriptFailedError(VerificationError):
    """A run of the script ended with an error."""

    def __init__(self, n: int, words: str, steps: Iterable[int]) -> None:
        made = ", ".join(map(str, steps))
        hint = ""
        if any(sign in words for sign in ("EOFError", "Inappropriate ioctl", "not a tty")):
            hint = (
                "\nThe script reads its standard input or needs a terminal, and has neither here. "
                "Pass the values as arguments instead."
            )
        super().__init__(
            f"the script fails {_at(n)}, after {made or 'no'} steps on its ranks:\n{words}{hint}"
        )


class ScriptLateError(VerificationError):
    """A run of the script was ended because it took too long."""

    def __init__(self, n: int, seconds: float, steps: Iterable[int]) -> None:
        made = ", ".join(map(str, steps))
        super().__init__(
            f"the script has not ended {_at(n)} after {seconds:.0f} seconds, far longer than one "
            f"process needs; its ranks have made {made} steps. Check that all ranks "
            "make the same decisions."
        )


class StepsError(VerificationError):
    """The script makes no training step."""

    def __init__(self, n: int) -> None:
        super().__init__(
            f"the script makes no step of a torch.optim optimizer {_at(n)}, so there is no "
            "training to compare. If it resumes from files of an earlier run, let it begin anew."
        )
