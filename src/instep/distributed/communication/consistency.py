"""Do all ranks mean the same? If not, every rank raises the same error."""

from __future__ import annotations

from collections.abc import Sequence

from instep.distributed.communication.transport import transport
from instep.distributed.errors import DisagreementError
from instep.distributed.rendezvous.bootstrap import ranks_by


def agree_on_each(values: Sequence[tuple[str, object]], advice: str) -> None:
    """Raise DisagreementError on all ranks unless each named value is the same on all, as text.

    The error shows the first that differs. Collective.
    """
    everybody = transport().all_gather_object([(name, str(value)) for name, value in values])
    longest = max(map(len, everybody))
    for k in range(longest):
        entries = [theirs[k] if k < len(theirs) else ("nothing", "nothing") for theirs in everybody]
        if len(set(entries)) > 1:
            names = dict.fromkeys(name for name, _ in entries if name != "nothing")
            seen = ranks_by([f"{name} {value}" for name, value in entries])
            raise DisagreementError(" or ".join(names), seen, advice)
