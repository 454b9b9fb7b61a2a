"""What `instep verify` cannot judge."""

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
                "\nThe script reads its standard input or needs a terminal; here it has neither. "
                "Give it what it asks for as arguments."
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
            f"process needs; its ranks have made {made} steps. Do all ranks decide alike?"
        )


class StepsError(VerificationError):
    """There is nothing to compare."""

    def __init__(self, n: int) -> None:
        super().__init__(
            f"the script makes no step of a torch.optim optimizer {_at(n)}, so there is no "
            "training to compare."
        )
