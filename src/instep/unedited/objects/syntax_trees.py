"""The syntax trees of the script's files, and the functions in them."""

from __future__ import annotations

import ast
import functools
import linecache
import types


@functools.cache
def tree_of(file: str) -> ast.Module:
    """What is in a file of the script's; nothing if it cannot be read any more."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # the file is another one by now
        return ast.Module([], [])


def definition_of(function: types.FunctionType) -> ast.FunctionDef | ast.Lambda | None:
    """A function as its file has it; None if it is not found there, or is not the only one."""
    code = function.__code__
    found = _definitions(code.co_filename).get((code.co_name, code.co_firstlineno), [])
    return found[0] if len(found) == 1 else None


@functools.cache
def _definitions(file: str) -> dict[tuple[str, int], list[ast.FunctionDef | ast.Lambda]]:
    """By their names and first lines."""
    found: dict[tuple[str, int], list[ast.FunctionDef | ast.Lambda]] = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
    return found
