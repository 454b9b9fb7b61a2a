"""Which tests run through which statement: every statement of a copy says that it was reached.

All processes that run in the copy, ranks and launched ones too, write into one mapping in shared
memory, a byte per statement. Between two tests it is read and cleared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MODULE = '''\
"""One byte for each statement, shared by all processes that run in this copy."""

import ctypes
import os

PATH, SIZE = {path!r}, {size}


def _mapping():
    try:
        file = os.open(PATH, os.O_RDWR)
    except OSError:
        return bytearray(SIZE)
    try:
        mmap = ctypes.CDLL(None, use_errno=True).mmap
        mmap.restype = ctypes.c_void_p
        mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = mmap(None, SIZE, 3, 1, file, 0)
    finally:
        os.close(file)
    return (ctypes.c_ubyte * SIZE).from_address(address)


_touched_ = _mapping()
'''


@dataclass(frozen=True)
class Site:
    """A statement: its file, its function (`Class.method`, or ""), and its first line."""

    path: str
    function: str
    text: str


def text_of(statement: ast.stmt) -> str:
    """What a statement is known by when lines have moved: its first line, as Python writes it."""
    return ast.unparse(statement).split("\n", 1)[0]


def instrument(path: str, source: bytes, sites: list[Site]) -> bytes:
    """The source with a note before each statement of a function; `sites` grows by these."""
    tree = ast.parse(source)
    for function, node in functions(tree):
        _note(node, path, function, sites)
    at = 1 if ast.get_docstring(tree) is not None else 0
    while at < len(tree.body) and isinstance(tree.body[at], ast.ImportFrom):
        if tree.body[at].module != "__future__":  # type: ignore[attr-defined]
            break
        at += 1
    tree.body[at:at] = ast.parse("from instep._touched import _touched_").body
    return ast.unparse(ast.fix_missing_locations(tree)).encode()


def functions(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, the outer before the inner."""

    def walk(
        node: ast.AST, name: str
    ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}{child.name}", child
                yield from walk(child, f"{name}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{name}{child.name}.")
            else:
                yield from walk(child, name)

    yield from walk(tree, "")


def _note(node: ast.AST, path: str, function: str, sites: list[Site]) -> None:
    """Put a note before each statement of the function's own blocks, not of functions in it."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        noted: list[ast.stmt] = []
        for position, statement in enumerate(block):
            docstring = position == 0 and isinstance(statement, ast.Expr)
            if not (docstring and isinstance(statement.value, ast.Constant)):
                sites.append(Site(path, function, text_of(statement)))
                noted += ast.parse(f"_touched_[{len(sites) - 1}] = 1").body
            noted.append(statement)
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _note(statement, path, function, sites)
        setattr(node, field, noted)
    for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        _note(inner, path, function, sites)
