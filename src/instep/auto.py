"""Unedited scripts: the whole batch in sight, the work shared.

`import instep.auto` as a script's first line does what `instep run` does: every rank runs the
whole script with the whole batch and equal numbers, and only inside the outermost call of a module
and inside data loading is the work divided.
"""

import sys

from instep.unedited import session


def _imported_by_the_script() -> bool:
    """Whether the import under way stands in `__main__`, and not in another module of instep's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") == __name__ or "importlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "__main__"


if _imported_by_the_script():
    session.start()
