"""A parsed Python file: its tree, which node contains which, and the full names of its imports.

`instep check` and `instep run` both read scripts through it.
"""

from __future__ import annotations

import ast
import io
import os
import stat
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import TypeVar, cast

from instep.process.patching import ignored_warnings

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef

_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DDP",
    "torch.nn.parallel.DistributedDataParallel": "torch.nn.parallel.DDP",
    "apex.parallel.distributed.DistributedDataParallel": "apex.parallel.DDP",
    "apex.parallel.DistributedDataParallel": "apex.parallel.DDP",
    "torch.utils.data.distributed.DistributedSampler": "torch.utils.data.DistributedSampler",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.nn.parallel.DataParallel": "torch.nn.DataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "torch.nn.DataParallel",
    "torch.distributed.distributed_c10d": "torch.distributed",
}
"""Several names of one thing, and the one that the rules use."""


class Script:
    """A Python file as a tree. Nothing in it is run or imported.

    Raises SyntaxError (ValueError for a null byte) when the text is not Python. Only the tree is
    made at once; each index is made on its first use, because `instep run` needs few of them.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        with ignored_warnings(""):  # the interpreter shows them where the script runs
            self.tree = ast.parse(text, filename=path)
        self._text = text
        self._names: dict[ast.AST, str] = {}
        self._texts: dict[ast.AST, str] = {}

    @classmethod
    def read(cls, path: str) -> Script:
        """Read a file in the encoding that it declares (PEP 263). Raises OSError too."""
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe waits, and /dev/zero has no end
            raise OSError("it is no ordinary file")
        if path.endswith(".ipynb"):  # many notebooks would parse as one expression
            raise OSError("it is a notebook; make a script: jupyter nbconvert --to script")
        with open(path, "rb") as file:
            source = file.read()
        if (error := encoding_error(source, path)) is not None:
            raise error
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return cls(path, io.TextIOWrapper(io.BytesIO(source), encoding).read())

    @cached_property
    def lines(self) -> list[str]:
        """The text, line by line."""
        return self._text.splitlines()

    @cached_property
    def _nodes(self) -> list[tuple[ast.AST, ast.AST | None]]:
        """Every node with its parent, in the order of the text."""
        found: list[tuple[ast.AST, ast.AST | None]] = []
        waiting: list[tuple[ast.AST, ast.AST | None]] = [(self.tree, None)]
        while waiting:
            found.append(waiting.pop())
            node = found[-1][0]
            waiting += [(child, node) for child in ast.iter_child_nodes(node)][::-1]
        return found

    @cached_property
    def _by_type(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node, _ in self._nodes:
            found.setdefault(type(node), []).append(node)
        return found

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {node: parent for node, parent in self._nodes if parent is not None}

    @cached_property
    def _functions(self) -> dict[ast.AST, Function | None]:
        """The innermost function around each node."""
        found: dict[ast.AST, Function | None] = {}
        for node, parent in self._nodes:
            found[node] = parent if isinstance(parent, Function) else found.get(parent or node)
        return found

    @cached_property
    def _calls_in(self) -> dict[Function | None, list[ast.Call]]:
        found: dict[Function | None, list[ast.Call]] = {}
        for call in self.all(ast.Call):
            found.setdefault(self._functions[call], []).append(call)
        return found

    def all(self, node_type: type[Node]) -> list[Node]:
        """Every node of this type, in the order of the text."""
        return cast(list[Node], self._by_type.get(node_type, []))

    # --- imports

    @cached_property
    def _members(self) -> list[tuple[str, str, str]]:
        """What `from … import` binds: the local name, the imported one, and the full one."""
        found = []
        for source in self.all(ast.ImportFrom):
            origin = "." * source.level + (source.module or "")
            prefix = origin if origin.endswith(".") else f"{origin}."
            found += [(a.asname or a.name, a.name, f"{prefix}{a.name}") for a in source.names]
        return found

    @cached_property
    def imported_names(self) -> list[str]:
        """Full names of all that is imported; a dot in front for each level of a relative one."""
        modules = [alias.name for plain in self.all(ast.Import) for alias in plain.names]
        return modules + [full for _, _, full in self._members]

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name to full dotted name."""
        found: dict[str, str] = {}
        for plain in self.all(ast.Import):
            for alias in plain.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        for name, imported, full in self._members:
            # Two different things under one name: nobody knows which is meant.
            is_same = found.get(name, full).split(".")[-1] == imported
            found[name] = full if is_same else ""
        return found

    @cached_property
    def imported_modules(self) -> frozenset[str]:
        """Full dotted names of all that is imported, modules and members."""
        names = {alias.name for plain in self.all(ast.Import) for alias in plain.names}
        return frozenset(names | set(self.imports.values()))

    @cached_property
    def imported_roots(self) -> frozenset[str]:
        """The first words of these: packages, and "" for relative imports."""
        return frozenset(name.partition(".")[0] for name in self.imported_modules)

    # --- names

    def dotted_name(self, node: ast.AST | None) -> str:
        """`args.rank` for that expression; "" for what is not a name with attributes."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([node.id, *reversed(parts)])

    def full_name(self, node: ast.AST | None) -> str:
        """The imported thing that a name (or the function of a call) stands for; else ""."""
        if isinstance(node, ast.Call):
            node = node.func
        if node is None:
            return ""
        if node not in self._names:
            first, _, rest = self.dotted_name(node).partition(".")
            start = self.imports.get(first, "")
            full = f"{start}.{rest}" if start and rest else start
            self._names[node] = _SAME.get(full, full)
        return self._names[node]

    def call_name(self, node: ast.AST | None) -> str:
        """The last word of what a call calls: `save` in `torch.save(x)`; else ""."""
        if not isinstance(node, ast.Call):
            return ""
        function = node.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return function.id if isinstance(function, ast.Name) else ""

    def owner(self, call: ast.Call) -> ast.expr | None:
        """The value whose method is called: `x` in `x.step()`; None for a plain call."""
        return call.func.value if isinstance(call.func, ast.Attribute) else None

    def calls_of(self, *full_names: str) -> Iterator[ast.Call]:
        """Calls of imported things, by full name, in the order of the text."""
        return (call for call in self.all(ast.Call) if self.full_name(call) in full_names)

    def calls_named(self, *words: str) -> Iterator[ast.Call]:
        """Calls of anything whose last word is one of these."""
        return (call for call in self.all(ast.Call) if self.call_name(call) in words)

    def source(self, node: ast.AST) -> str:
        """The expression as text, on one line."""
        if node not in self._texts:
            try:
                self._texts[node] = ast.unparse(node)
            except RecursionError:  # a chain of a thousand calls, which Python itself runs
                self._texts[node] = "..."
        return self._texts[node]

    @cached_property
    def strings(self) -> frozenset[str]:
        """Every string constant."""
        return frozenset(
            node.value for node in self.all(ast.Constant) if isinstance(node.value, str)
        )

    # --- places

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the parent up to the module."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def parent(self, node: ast.AST) -> ast.AST:
        """The node that holds this one (the module holds itself)."""
        return self._parents.get(node, self.tree)

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function that contains the node; None at module level."""
        return self._functions.get(node)

    def are_in_one_function(self, first: ast.AST, second: ast.AST) -> bool:
        """Whether the innermost function around both is the same, or there is none."""
        return self.function_of(first) is self.function_of(second)

    def calls_in(self, function: Function | None) -> list[ast.Call]:
        """Calls in a function's own text, without those in functions inside it."""
        return self._calls_in.get(function, [])

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement that the node belongs to."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def is_inside(self, node: ast.AST, container: ast.AST) -> bool:
        """Whether the node is the container or somewhere in it."""
        return node is container or any(above is container for above in self.ancestors(node))

    def calls_inside(self, container: ast.AST) -> list[ast.Call]:
        """Calls anywhere in a node, in the order of the text."""
        return [call for call in self.all(ast.Call) if self.is_inside(call, container)]

    def parent_loops(self, node: ast.AST) -> Iterator[ast.For | ast.While]:
        """Loops of the same function around a node, innermost first."""
        for above in self.ancestors(node):
            if isinstance(above, Function):
                return
            if isinstance(above, ast.For | ast.While):
                yield above

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """Functions and methods by name."""
        found: dict[str, list[Function]] = {}
        plain: list[Function] = [*self.all(ast.FunctionDef)]
        for function in [*plain, *self.all(ast.AsyncFunctionDef)]:
            found.setdefault(function.name, []).append(function)
        return found

    def are_exclusive(self, first: ast.AST, second: ast.AST) -> bool:
        """Whether the two lie in different branches of one `if`, so that only one runs."""
        above = {node: child for child, node in _parent_steps(self, first)}
        for child, node in _parent_steps(self, second):
            if node in above and isinstance(node, ast.If):
                return _branch(node, above[node]) != _branch(node, child)
        return False


def _parent_steps(script: Script, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for above in script.ancestors(node):
        yield node, above
        node = above


def _branch(test: ast.If, child: ast.AST) -> str:
    if any(child is statement for statement in test.body):
        return "body"
    return "orelse" if any(child is statement for statement in test.orelse) else "test"


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The value that a call gives for an argument, by name or by position."""
    for given in call.keywords:
        if given.arg == name:
            return given.value
    if position is not None and len(call.args) > position:
        return call.args[position]
    return None


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None for everything else (and for None)."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = constant(node.operand)
        return -inner if isinstance(inner, int | float) else None
    return node.value if isinstance(node, ast.Constant) else None


def encoding_error(source: bytes, path: str) -> SyntaxError | None:
    """The error of the interpreter for a file that is not in UTF-8 and declares nothing else;
    compiled from memory, such a file is not named, nor its line."""
    with suppress(SyntaxError):
        if tokenize.detect_encoding(io.BytesIO(source).readline)[0] not in ("utf-8", "utf-8-sig"):
            return None
    try:
        source.decode()
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        return SyntaxError(
            f"Non-UTF-8 code starting with '\\x{source[error.start]:02x}' in file {path} on line "
            f"{line}, but no encoding declared; see https://peps.python.org/pep-0263/ for details"
        )
    return None
