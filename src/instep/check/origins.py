"""Origins of values: assignments, arguments, and options of argparse."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.script import Function, Script, constant, keyword

_DEPTH = 6


@dataclass(frozen=True)
class Binding:
    """One assignment of a value to a name (or to `a.b`)."""

    statement: ast.AST
    value: ast.expr


class Origins:
    """Follows names back to the expressions that made their values."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._bindings: dict[tuple[Function | None, str], list[Binding]] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._cache: dict[ast.AST, list[ast.expr]] = {}
        for statement, target, value in _assignments(script):
            self._add_binding(statement, target, value)
        for call in script.all(ast.Call):
            self._calls.setdefault(script.call_name(call), []).append(call)
        self.options = {_destination(call): call for call in script.calls_named("add_argument")}

    def _add_binding(self, statement: ast.AST, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            pairs = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for place, part in enumerate(target.elts):
                inner = value.elts[place] if pairs and isinstance(value, ast.Tuple) else value
                self._add_binding(statement, part, inner)
        elif name := self.script.dotted_name(target):
            function = self.script.function_of(statement)
            self._bindings.setdefault((function, name), []).append(Binding(statement, value))

    def bindings(self, node: ast.AST) -> list[Binding]:
        """The assignments that a name may have its value from: of its function, else outside.

        An attribute (`args.rank`) that is not assigned in the function is looked for everywhere.
        """
        name = self.script.dotted_name(node)
        if not name:
            return []
        function = self.script.function_of(node)
        own = self._bindings.get((function, name), [])
        if own:
            return self._reaching(node, own)
        if "." in name:
            return [
                b for (_, bound), found in self._bindings.items() if bound == name for b in found
            ]
        if function is not None and name in _parameters(function):
            return []
        return self._bindings.get((None, name), [])

    def _reaching(self, node: ast.AST, found: list[Binding]) -> list[Binding]:
        """Those assignments that the use of the name can still see: made before it, and not
        made again, for sure, in between."""
        line = getattr(node, "lineno", 0)
        before = [
            b
            for b in found
            if getattr(b.statement, "lineno", 0) <= line
            and not self.script.is_inside(node, b.statement)
        ]
        above = set(self.script.ancestors(node))
        for place in range(len(before) - 1, 0, -1):
            if self.script.parent(before[place].statement) in above:
                return before[place:]
        if before:
            return before
        loops = set(self.script.parent_loops(node))
        again = [b for b in found if loops & set(self.script.parent_loops(b.statement))]
        function = self.script.function_of(node)
        dotted = self.script.dotted_name(node)
        handed_in = function is not None and dotted.split(".")[0] in _parameters(function)
        return again if handed_in else found

    def of(self, node: ast.expr | None) -> list[ast.expr]:
        """The expressions that a value may come from; the expression itself if it is no name."""
        if node is None:
            return []
        if node not in self._cache:
            self._cache[node] = list(self._follow(node, _DEPTH, set()))
        return self._cache[node]

    def _follow(self, node: ast.expr, depth: int, seen: set[ast.AST]) -> Iterator[ast.expr]:
        if node in seen or depth == 0:
            return
        seen.add(node)
        if isinstance(node, ast.IfExp):
            yield from self._follow(node.body, depth, seen)
            yield from self._follow(node.orelse, depth, seen)
        elif isinstance(node, ast.Name | ast.Attribute):
            sources = [b.value for b in self.bindings(node)] + list(self.arguments_of(node))
            for source in sources:
                yield from self._follow(source, depth - 1, seen)
            option = self.option(node)
            if option is not None:
                yield option
            if not sources and option is None:
                yield node
        else:
            yield node

    def arguments_of(self, node: ast.AST) -> Iterator[ast.expr]:
        """What the calls in this script pass for a parameter; nothing for another name."""
        function = self.script.function_of(node)
        if function is None or not isinstance(node, ast.Name):
            return
        names = _parameters(function)
        if node.id not in names or self.bindings(node):
            return
        position = names.index(node.id) - (names[0] == "self")
        for call in self.calls_of(function) if position >= 0 else []:
            value = keyword(call, node.id, position)
            if value is not None and not any(isinstance(a, ast.Starred) for a in call.args):
                yield value
        for given, first in self._spawned_with(function):
            if 0 <= position - first < len(given.elts):
                yield given.elts[position - first]

    def _spawned_with(self, function: Function) -> Iterator[tuple[ast.Tuple, int]]:
        """The `args` of mp.spawn(function, args) and Process(target=function, args), and the
        position of their first one: spawn passes the index of the process before them."""
        for word, name, place, first in (("spawn", "fn", 0, 1), ("Process", "target", 1, 0)):
            for call in self._calls.get(word, []):
                given = keyword(call, "args", place + 1)
                started = self.script.dotted_name(keyword(call, name, place))
                if started == function.name and isinstance(given, ast.Tuple):
                    yield given, first

    def calls_of(self, function: Function) -> list[ast.Call]:
        """Calls in this script of the function, by its name: `f()`, of a method `x.f()`."""
        method = isinstance(self.script.parent(function), ast.ClassDef)
        return [
            call
            for call in self._calls.get(function.name, [])
            if isinstance(call.func, ast.Attribute) == method
            and not self.script.full_name(call)
            and not self._asks_a_base_class(call, function)
        ]

    def _asks_a_base_class(self, call: ast.Call, method: Function) -> bool:
        """`super().f()` in the class of this `f`: it calls the one that this `f` overrides."""
        asked = self.script.call_name(self.script.owner(call))
        return asked == "super" and self.script.is_inside(call, self.script.parent(method))

    def option(self, node: ast.AST) -> ast.Call | None:
        """The `add_argument` call behind `args.name`."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id.lower()
            if any(word in name for word in ("arg", "opt", "cfg", "config", "flags", "hparams")):
                return self.options.get(node.attr)
        return None

    def number(self, node: ast.expr | None) -> float | None:
        """The number that a value is, or that is its default on the command line."""
        for origin in self.of(node):
            if isinstance(origin, ast.Call) and self.script.call_name(origin) == "add_argument":
                value = constant(keyword(origin, "default"))
            else:
                value = constant(origin)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
        return None

    def calls(self, node: ast.expr | None) -> list[ast.Call]:
        """The calls among the origins of a value."""
        return [origin for origin in self.of(node) if isinstance(origin, ast.Call)]

    def text(self, node: ast.expr | None) -> str:
        """A value's own text and that of all it comes from: for looking for words in it."""
        if node is None:
            return ""
        texts = [self.script.source(node)]
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute):
                texts += [
                    self.script.source(origin)
                    for origin in self.of(inner)
                    if self.script.call_name(origin) != "add_argument"  # its help says anything
                ]
        return " ".join(texts)


def _assignments(script: Script) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    for plain in script.all(ast.Assign):
        for target in plain.targets:
            yield plain, target, plain.value
    for typed in script.all(ast.AnnAssign):
        if typed.value is not None:
            yield typed, typed.target, typed.value
    for named in script.all(ast.NamedExpr):
        yield named, named.target, named.value
    for opened in script.all(ast.With):
        for item in opened.items:
            if item.optional_vars is not None:
                yield opened, item.optional_vars, item.context_expr


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _destination(call: ast.Call) -> str:
    """The attribute that argparse makes of an option: `dest`, else its first long name."""
    given = constant(keyword(call, "dest"))
    if isinstance(given, str):
        return given
    names = [value for argument in call.args if isinstance(value := constant(argument), str)]
    long = [name for name in names if name.startswith("--")] or names
    return long[0].lstrip("-").replace("-", "_") if long else ""
