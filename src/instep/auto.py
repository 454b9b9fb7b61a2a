"""`import instep.auto` as a script's first line does what `instep run` does.

Every rank runs the whole script with whole batches and equal random numbers. The ranks share the
work only inside the outermost call of a module, and as they load data.
"""

import sys

from instep.process import settings
from instep.unedited import session
from instep.unedited.errors import CannotSaveScriptError


def _is_imported_by_script() -> bool:
    """Whether `__main__` imports this module, and not another module of instep."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") == __name__ or "importlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "__main__"


if _is_imported_by_script():
    if session.current() is None and str(settings.CHECKPOINT):
        raise CannotSaveScriptError(
            "INSTEP_CHECKPOINT: a script that imports instep.auto runs already, so that its loop "
            "cannot be saved. Start it with instep run --checkpoint, or under another launcher "
            "with python -m instep."
        )
    session.start()
