"""Run a program in this process as `python script.py` or `python -m module` would."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from instep.check.script import encoding_error
from instep.compat import finder

Compile = Callable[[bytes, str], CodeType]


_FRAME_SLOTS = 65_000
"""What the program's first frame asks for, in pointers: its thread's stack of frames then gets a
chunk of 1 MiB, half of which is for the frames above. Otherwise it grows by 16 KiB at some depth,
and each call that goes beyond asks the system for a chunk, and gives it back when it returns
(CPython 3.11 and later, Python/pystate.c: push_chunk). If that depth is that of a model's layers,
a call of a small one takes twice as long. Only pages that are used take memory."""


def compile_as_is(source: bytes, path: str) -> CodeType:
    """The code of a file, as the interpreter compiles it."""
    return compile(source, path, "exec", dont_inherit=True)


def run_as_main(command: Sequence[str], compile_file: Compile = compile_as_is) -> None:
    """Run `script.py args…` or `-m package.module args…`. Its exceptions escape.

    Replaces `__main__` in sys.modules (so that pickling and spawned processes find the script's
    names), sys.argv and the first entry of sys.path, and does not restore them, because the
    program's threads and exit handlers still need them. Libraries that are not installed are found
    in `instep.compat`.
    """
    finder.install()
    if command[0] == "-m":
        _run_module(compile_file, *command[1:])
    else:
        _run_file(compile_file, *command)


def _run_file(compile_file: Compile, path: str, *arguments: str) -> None:
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    where = os.path.abspath(path)
    main = _new_main(where)
    main.__loader__ = SourceFileLoader("__main__", where)
    with io.open_code(where) as file:
        source = file.read()
    if (error := encoding_error(source, where)) is not None:
        raise error
    _execute(compile_file(source, where), main)


def _run_module(compile_file: Compile, name: str, *arguments: str) -> None:
    sys.argv[:] = ["-m", *arguments]
    sys.path.insert(0, os.getcwd())
    main = _new_main(None)
    spec, code = _find_module(name)
    assert spec.origin is not None
    if compile_file is not compile_as_is and spec.origin.endswith(".py"):
        code = compile_file(Path(spec.origin).read_bytes(), spec.origin)
    sys.argv[0] = main.__file__ = spec.origin
    main.__spec__, main.__loader__ = spec, spec.loader
    main.__package__ = spec.parent
    vars(main)["__cached__"] = spec.cached
    _execute(code, main)


def _execute(code: CodeType, main: ModuleType) -> None:
    exec(code.replace(co_stacksize=max(code.co_stacksize, _FRAME_SLOTS)), main.__dict__)


def _new_main(path: str | None) -> ModuleType:
    main = ModuleType("__main__")
    main.__file__ = path
    vars(main).update(__cached__=None, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """Find a module's code; of a package, that of its `__main__`. Imports the packages above."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if spec.submodule_search_locations is not None:
        return _find_module(f"{name}.__main__")
    code = spec.loader.get_code(name) if isinstance(spec.loader, InspectLoader) else None
    if code is None:
        raise ImportError(f"{name!r} has no Python code to run", name=name)
    return spec, code
