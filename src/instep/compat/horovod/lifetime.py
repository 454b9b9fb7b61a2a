"""init and shutdown."""

from __future__ import annotations

import atexit
from collections.abc import Sequence

from instep.compat.horovod import session, sets
from instep.compat.horovod.errors import NotThereError
from instep.compat.horovod.sets import ProcessSet


def init(
    comm: object | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Meet the other ranks; does nothing where that has happened.

    Args:
        comm: must be None: which ranks there are is the launcher's to say.
        process_sets: ProcessSets to register at once. "dynamic" has no meaning here: sets can
            always be added.

    Collective; again after shutdown(). Raises NotThereError for a `comm`, LaunchError.
    """
    if comm is not None:
        raise NotThereError.communicator()
    if session.is_initialized():
        return
    session.begin()
    atexit.register(shutdown)
    sets.begin()
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            sets.add_process_set(process_set)


def shutdown() -> None:
    """Leave; does nothing where there is nothing to leave.

    What other ranks have under way ends with HorovodInternalError there.
    """
    if session.is_initialized():
        atexit.unregister(shutdown)
        sets.end()
        session.end()
