"""Why a call is computed whole on every rank, and what that means for the calls after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


class ReasonKind(Enum):
    """For which calls a reason holds."""

    LASTING = auto()
    """It holds for all calls like this one."""
    OF_ARGUMENTS = auto()
    """It lies in the arguments; its text begins with "where", and other calls are not affected."""
    SIDE_EFFECT = auto()
    """A forward has done what cannot be undone; many do it in their first call only."""
    CHANGES_PARAMETERS = auto()
    """Likewise; and the ranks' parameters may come to differ by rounding."""
    MOVES_PARAMETERS = auto()
    """Likewise; and the next comparison can set the parameters back."""
    FREEZES = auto()
    """A forward has set requires_grad of its parameters; many do it in their first call only."""
    MAKES_PART = auto()
    """A forward has made a part of its module, which the next call finds."""
    UNLIKE_BUFFERS = auto()
    """The ranks' buffers differ, which a first forward may fill."""
    SETS_UP = auto()
    """A forward that is not the same for a part of the batch has changed what it keeps: it may have
    set itself up by its first batch."""
    KEEPS_TENSORS = auto()
    """A forward has set attributes to tensors, which it may do once, or read in its next call."""


@dataclass(frozen=True)
class WholeReason:
    """Why a call is computed whole."""

    text: str
    """For the user, without a full stop."""
    kind: ReasonKind = ReasonKind.LASTING

    @classmethod
    def of(cls, text: str | None) -> WholeReason | None:
        """A lasting one with this text; None if there is none."""
        return cls(text) if text else None

    def followed_by(self, text: str) -> WholeReason:
        """This reason with more text at the end."""
        return replace(self, text=self.text + text)


FREEZES = WholeReason("its forward freezes or unfreezes parameters", ReasonKind.FREEZES)
FEW_ROWS = WholeReason(
    "where a batch has fewer rows than there are ranks; other batches are not affected",
    ReasonKind.OF_ARGUMENTS,
)
SHORT_FIRST = WholeReason(
    "where its first argument has fewer rows than there are ranks; other batches are not affected",
    ReasonKind.OF_ARGUMENTS,
)
NO_ROWS = WholeReason("where none of its arguments has rows", ReasonKind.OF_ARGUMENTS)
OTHER_ROWS = WholeReason(
    "where those of its arguments that have been divided together do not have the same number of "
    "rows; other calls are not affected",
    ReasonKind.OF_ARGUMENTS,
)
