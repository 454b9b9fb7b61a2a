"""Reads a script, and what it imports from beside it, for what makes it one to be left alone."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from instep.launch.worker import unconditional_calls

MOST = 300
"""Files that are read at most."""
_EXPLICIT_LIBRARIES = {"instep", "horovod"}
"""Packages whose use means that the script divides its work itself."""
_UNEDITED = ("instep.auto.", "instep.unedited.")
"""Modules of these whose use does not mean it."""


def find_opt_out(command: Sequence[str]) -> str | None:
    """Why this program is to be left alone, if its text says so; runs and imports nothing."""
    entry, root = _find_entry(command)
    waiting, seen = [entry], {entry}
    while waiting and len(seen) <= MOST:
        path = waiting.pop()
        tree = _parse(path)
        if tree is None:
            continue
        if path == entry and unconditional_calls.calls(tree, "init_process_group"):
            return "it starts a process group of its own"
        names = [*_imported_names(tree)]
        if library := next(filter(None, map(_explicit_library, names)), None):
            return f"{os.path.relpath(path)} uses {library} itself"
        new = {file for name in names for file in _find_local_files(name, path, root)} - seen
        seen |= new
        waiting += sorted(new)
    return None


def _find_entry(command: Sequence[str]) -> tuple[Path, Path]:
    """The file that runs first, and where it imports its neighbours from."""
    if command[0] != "-m":
        path = Path(command[0]).resolve()
        return path, path.parent
    root = Path.cwd()
    module = root.joinpath(*command[1].split("."))
    return (module / "__main__.py" if module.is_dir() else module.with_suffix(".py")), root


def _parse(path: Path) -> ast.Module | None:
    """None for what cannot be read: whoever runs it will see why."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Every name that is imported, with a dot for each level that it is relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            separator = "" if origin.endswith(".") else "."
            yield from (f"{origin}{separator}{alias.name}" for alias in node.names)


def _explicit_library(name: str) -> str | None:
    """The library by which a script that imports this name speaks to the other ranks."""
    root = name.partition(".")[0]
    explicit = root in _EXPLICIT_LIBRARIES and not f"{name}.".startswith(_UNEDITED)
    return root if explicit else None


def _find_local_files(name: str, importer: Path, root: Path) -> Iterator[Path]:
    """The user's own files that an import of this name runs."""
    level = len(name) - len(name.lstrip("."))
    above = importer.parents[level - 1] if 0 < level <= len(importer.parents) else root
    parts = [part for part in name.split(".") if part]
    for depth in range(1, len(parts) + 1):
        place = above.joinpath(*parts[:depth])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
