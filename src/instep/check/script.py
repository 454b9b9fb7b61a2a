"""One parsed script: its tree, who contains whom, and the full name of what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import TypeVar, cast

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
"""Names that mean the same thing, and the one that the rules ask for."""


class Script:
    """A training script as a tree. Nothing in it is run or imported.

    Raises SyntaxError (ValueError for a null byte) when the text is not Python.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()
        self.tree = ast.parse(text, filename=path)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._functions: dict[ast.AST, Function | None] = {}
        self._calls_in: dict[Function | None, list[ast.Call]] = {}
        self._names: dict[ast.AST, str] = {}
        self._texts: dict[ast.AST, str] = {}
        self._by_type: dict[type[ast.AST], list[ast.AST]] = {}
        self._index()
        self.imports = self._read_imports()

    def _index(self) -> None:
        """Depth first, so that every list is in the order of the text."""
        waiting: list[tuple[ast.AST, Function | None]] = [(self.tree, None)]
        while waiting:
            node, function = waiting.pop()
            node_type = type(node)
            self._by_type.setdefault(node_type, []).append(node)
            self._functions[node] = function
            if node_type is ast.Call:
                self._calls_in.setdefault(function, []).append(cast(ast.Call, node))
            inner = node if isinstance(node, Function) else function
            children = list(ast.iter_child_nodes(node))
            for child in reversed(children):
                self._parents[child] = node
                waiting.append((child, inner))

    def all(self, node_type: type[Node]) -> list[Node]:
        """Every node of this type, in the order of the text."""
        return cast(list[Node], self._by_type.get(node_type, []))

    def _read_imports(self) -> dict[str, str]:
        """Local name to full dotted name."""
        found: dict[str, str] = {}
        for plain in self.all(ast.Import):
            for alias in plain.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        for source in self.all(ast.ImportFrom):
            origin = "." * source.level + (source.module or "")
            for alias in source.names:
                name = alias.asname or alias.name
                full = f"{origin}.{alias.name}"
                if found.get(name, full).split(".")[-1] != alias.name:
                    full = ""  # two different things under one name: nobody knows which
                found[name] = full
        return found

    @cached_property
    def imported_modules(self) -> frozenset[str]:
        """Full dotted names of all that is imported, modules and members."""
        names = {alias.name for plain in self.all(ast.Import) for alias in plain.names}
        return frozenset(names | set(self.imports.values()))

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

    def calls_of(self, *full_names: str) -> Iterator[ast.Call]:
        """Calls of imported things, by full name, in the order of the text."""
        return (call for call in self.all(ast.Call) if self.full_name(call) in full_names)

    def calls_named(self, *split_words: str) -> Iterator[ast.Call]:
        """Calls of anything whose last word is one of these."""
        return (call for call in self.all(ast.Call) if self.call_name(call) in split_words)

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

    def enclosing_loops(self, node: ast.AST) -> Iterator[ast.For | ast.While]:
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
