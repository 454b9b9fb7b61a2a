"""The syntax trees of the script's files, and the functions in them."""

from __future__ import annotations

import ast
import functools
import linecache
import types

from instep.process.patching import ignored_warnings


@functools.cache
def tree_of(file: str) -> ast.Module:
    """What is in a file of the script's; nothing if it cannot be read any more."""
    try:
        with ignored_warnings(""):  # the import has shown them
            return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # the file is another one by now
        return ast.Module([], [])


@functools.cache
def compares_types(file: str) -> bool:
    """Whether code in a file asks which class something is of exactly, as in
    `type(x) is torch.Tensor`, other than for Python's own classes."""
    return any(map(_compares_type, ast.walk(tree_of(file))))


_OWN_CLASSES = frozenset(
    (
        *("bool", "bytes", "complex", "dict", "float", "int", "list", "set", "str", "tuple"),
        *("type(None)", "type(self)"),
    )
)


def _compares_type(node: ast.AST) -> bool:
    """Whether a node uses `type(x)` as a value to be compared, looked up or kept."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(_is_type_of, sides)) and not any(map(_is_own_class, sides))
    if isinstance(node, ast.Assign | ast.NamedExpr):
        return _is_type_of(node.value)
    if isinstance(node, ast.Subscript):
        return _is_type_of(node.slice)
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "get":
        return False
    return any(map(_is_type_of, node.args))


def _is_type_of(node: ast.AST) -> bool:
    """`type(x)`, where x is neither `self` nor None."""
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"):
        return False
    return len(node.args) == 1 and ast.unparse(node.args[0]) not in ("self", "None")


def _is_own_class(node: ast.AST) -> bool:
    """A class of Python's own, that of `self`, or a tuple, list or set of such."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return all(map(_is_own_class, node.elts))
    return ast.unparse(node) in _OWN_CLASSES


def definition_of(function: types.FunctionType) -> ast.FunctionDef | ast.Lambda | None:
    """A function as its file has it; None if it is not found there, or is not the only one."""
    return definition_of_code(function.__code__)


def definition_of_code(code: types.CodeType) -> ast.FunctionDef | ast.Lambda | None:
    """As `definition_of`, of the function that has this code."""
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
