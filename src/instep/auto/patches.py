"""The table: every function that answers for another one while a script is divided, and why.

The rooms provide the replacements; this is the only place where they are put in. In a world of one
nothing is.
"""

from __future__ import annotations

from instep.auto.patching import Patch, Patched

PATCHES: tuple[Patch, ...] = ()

_put_in: list[Patched] = []


def install() -> None:
    """Put the whole table in; does nothing where it is in already."""
    if not _put_in:
        _put_in.append(Patched(PATCHES))


def undo() -> None:
    """Take everything out again, exactly; does nothing where nothing is in."""
    while _put_in:
        _put_in.pop().undo()
