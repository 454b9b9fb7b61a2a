"""What a function computes from values that it reads from rows, found in its syntax tree.

`labels = y.tolist()` has an entry for each row, `len(set(labels))` tells of all rows, and so does
`last` where a loop over the rows sets it for the next one. A branch by what tells of all rows may
be another one for a part of the batch; one by a row's own values is that row's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import NamedTuple

from instep.unedited.objects.syntax_trees import definition_of
from instep.unedited.sharded_call.compare.probes.row_kinds import (
    ALL,
    CHANGING,
    CHOSEN,
    GROWING,
    KEEPING,
    NO_ENTRIES,
    NONE,
    ROWS,
    TENSORS,
    Position,
    RowKind,
    RowValue,
    all_of,
    carried_by,
    counters_of,
    expressions_in,
    first_of,
    has_key,
    is_along_others,
    is_floor,
    is_of_entries,
    is_one_entry,
    is_part,
    names_in,
    position_of,
    root_of,
)

Resolve = Callable[[ast.expr], FunctionType | None]
"""Gets the script's function that an expression calls, if it is one."""
_MAX_DEPTH = 3
_Conditional = ast.If | ast.While | ast.IfExp | ast.comprehension


class Branch(NamedTuple):
    """A branch by what tells of all rows, or by which a loop over the rows ends."""

    file: str
    node: ast.If | ast.While | ast.expr
    """An expression: one that chooses, as `min(n, 8)` or a condition of a comprehension."""
    is_of_list: bool = False
    """Whether it asks whether any rows were chosen."""


class FunctionRows:
    """A function, of which some expressions read from rows."""

    def __init__(
        self,
        file: str,
        node: ast.FunctionDef | ast.Lambda,
        seeds: Mapping[Position, RowValue],
        resolve: Resolve,
        arguments: Mapping[str, RowValue] | None = None,
        depth: int = 0,
    ) -> None:
        self.returned = NONE
        self.branches: list[Branch] = []
        self._file, self._seeds, self._resolve, self._depth = file, seeds, resolve, depth
        self._names: dict[str, RowValue] = dict(arguments or {})
        self._loops: list[_OpenLoop] = []
        body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
        self._run(body)

    def _run(self, statements: Iterable[ast.stmt]) -> None:
        for each in statements:
            self._run_one(each)

    def _run_one(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self._value(value)
                for target in targets:
                    self._set(target, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._set(target, self._value(value))
            case ast.AugAssign(target=target, value=value):
                self._set(target, self._value(value), adds=True)
            case ast.Expr(value=value):
                self._value(value)
            case ast.Return(value=value):
                self.returned |= NONE if value is None else self._value(value)
                self._end_loops(self._loops)
            case ast.Break():
                self._end_loops(self._loops[-1:])
            case ast.If(test=test, body=body) | ast.While(test=test, body=body):
                for _ in self._rounds(node):
                    with self._under(node, self._test(test, node)):
                        self._run([*body, *node.orelse])
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                with self._loop(target, iterated, position_of(node), node):
                    for _ in self._rounds(node):
                        self._run(body)
                self._run(orelse)
            case ast.With(body=body):
                self._run(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
                self._run([*body, *(x for each in handlers for x in each.body), *orelse, *last])

    def _rounds(self, node: ast.stmt) -> range:
        """Two of a loop, which reads at its beginning what it has set at its end."""
        return range(1 if isinstance(node, ast.If) else 2)

    def _end_loops(self, loops: Sequence[_OpenLoop]) -> None:
        """Note the conditions under which loops over rows end early."""
        for loop in loops:
            if loop.is_over_rows:
                self.branches += [
                    Branch(self._file, node) for node, found in loop.conditions if found.has_rows
                ]

    @contextmanager
    def _under(self, node: ast.If | ast.While, found: RowValue) -> Iterator[None]:
        """Inside, statements run under this condition."""
        for loop in self._loops:
            loop.conditions.append((node, found))
        yield
        for loop in self._loops:
            loop.conditions.pop()

    @contextmanager
    def _loop(
        self, target: ast.expr, iterated: ast.expr, begin: Position, *inside: ast.AST
    ) -> Iterator[None]:
        """Inside, a loop is under way that has these nodes; `begin`: the place of what begins to
        iterate, which is that of the whole loop."""
        over = self._value(iterated).or_other(self._seeds.get(begin, NONE))
        is_over_rows = over.is_list or self._has_rows_of(names_in(target), inside)
        label = f"{iterated.lineno}:{iterated.col_offset}"
        of_row = RowValue(RowKind.ROW, frozenset((label,)))
        carried = frozenset[str]().union(*map(carried_by, inside)) if is_over_rows else frozenset()
        loop = _OpenLoop(is_over_rows, carried, frozenset(counters_of(target, iterated)))
        if over.kind is RowKind.ALL:
            self._set(target, ALL if is_of_entries(target, iterated) else of_row)
        else:
            self._set(target, of_row if is_over_rows else over)
        self._loops.append(loop)
        yield
        self._loops.pop()

    def _has_rows_of(self, names: set[str], inside: Sequence[ast.AST]) -> bool:
        """Whether these variables of a loop say which row is read in it."""
        for each in (x for root in inside for x in ast.walk(root)):
            match each:
                case ast.Subscript(value=ast.Name(id=name), slice=key):
                    if names & names_in(key) and self._names.get(name, NONE).is_list:
                        return True
            seed = self._seeds.get(position_of(each), NONE) if isinstance(each, ast.expr) else NONE
            if seed.kind is RowKind.ROW and names & names_in(each):
                return True
        return False

    def _set(self, target: ast.expr, value: RowValue, *, adds: bool = False) -> None:
        match target:
            case ast.Name(id=name):
                before = self._names.get(name, NONE)
                if any(name in loop.carried for loop in self._loops):
                    value = ALL if value.has_rows or self._is_of_some_rows() else value
                keeps = adds or self._is_of_some_rows()
                self._names[name] = before.or_other(value) if keeps else value
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for each in elements:
                    self._set(each, value)
            case ast.Starred(value=inside):
                self._set(inside, value)
            case ast.Subscript(value=ast.Name(id=name), slice=key):
                is_counter = any(names_in(key) <= loop.counters for loop in self._loops)
                by_value = self._value(key).has_rows and not is_counter
                if self._is_in_rows() and (by_value or value.kind is RowKind.ALL):
                    self._names[name] = ALL

    def _is_in_rows(self) -> bool:
        return any(loop.is_over_rows for loop in self._loops)

    def _is_of_some_rows(self) -> bool:
        """Whether what happens here happens for some rows only."""
        of_rows = (loop for loop in self._loops if loop.is_over_rows)
        return any(found.has_rows for loop in of_rows for _, found in loop.conditions)

    def _test(self, test: ast.expr, branch: _Conditional) -> RowValue:
        """The value of a condition; a branch by one that tells of all rows is noted."""
        found = self._value(test)
        node = test if isinstance(branch, ast.comprehension) else branch
        if not isinstance(branch, ast.comprehension):  # a jump may have the place of the statement
            found |= self._seeds.get(position_of(branch), NONE)
        if found.kind in (RowKind.ALL, RowKind.CHOSEN):
            self.branches.append(Branch(self._file, node, found.kind is RowKind.CHOSEN))
        return found

    def _value(self, node: ast.expr) -> RowValue:
        found = self._value_of_parts(node)
        seed = NONE if isinstance(node, ast.IfExp) else self._seeds.get(position_of(node), NONE)
        if seed.kind is RowKind.ROW and not seed.loops:
            seed = replace(seed, loops=found.loops)
        return seed.or_other(found)

    def _value_of_parts(self, node: ast.expr) -> RowValue:
        match node:
            case ast.Name(id=name):
                value = self._names.get(name, NONE)
                is_carried = any(name in loop.carried for loop in self._loops)
                return ALL if is_carried and value.has_rows else value
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=value, slice=key):
                return self._entry(self._value(value), key)
            case ast.Attribute(value=value, attr=attr):
                return NONE if attr in NO_ENTRIES else self._value(value)
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._test(test, node) | self._value(body).or_other(self._value(orelse))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, [node.elt])
            case ast.DictComp(key=key, value=value):
                return self._comprehension(node, [key, value])
            case ast.NamedExpr(target=target, value=value):
                found = self._value(value)
                self._set(target, found)
                return found
            case ast.Lambda(body=body):
                return self._value(body)
        return all_of(map(self._value, expressions_in(node)))

    def _comparison(self, node: ast.Compare) -> RowValue:
        found = self._value(node.left)
        for operator, each in zip(node.ops, node.comparators, strict=True):
            other = self._value(each)
            if isinstance(operator, ast.Is | ast.IsNot):
                return NONE
            is_asked_for = isinstance(operator, ast.In | ast.NotIn) and other.is_list
            found |= ALL if is_asked_for else other
        return found

    def _entry(self, value: RowValue, key: ast.expr) -> RowValue:
        """What stands at this key, or these places, of a value."""
        if not value.is_list:
            return value | self._value(key)
        key = first_of(key)
        if is_one_entry(key) or is_part(key):
            return ALL
        by = self._value(key)
        if isinstance(key, ast.Slice | ast.Constant) or by.kind is RowKind.ALL:
            return value | by
        if by.is_list:
            return CHOSEN
        return RowValue(RowKind.ROW, by.loops or frozenset(names_in(key)))

    def _comprehension(
        self,
        node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp,
        elements: Sequence[ast.expr],
    ) -> RowValue:
        names, by, is_of_rows, begin = dict(self._names), NONE, False, position_of(node)
        inside = [*elements, *(test for each in node.generators for test in each.ifs)]
        with ExitStack() as loops:
            for each in node.generators:
                loops.enter_context(self._loop(each.target, each.iter, begin, *inside))
                begin = position_of(each.iter)
                is_of_rows |= self._loops[-1].is_over_rows
                for test in each.ifs:
                    by |= self._test(test, each)
            found = all_of(map(self._value, elements))
        self._names = names
        if ALL in (found, by):
            return ALL
        if not (is_of_rows or found.has_rows or by.has_rows):
            return NONE
        if isinstance(node, ast.SetComp | ast.DictComp):
            return ALL
        return CHOSEN if by.has_rows else ROWS

    def _call(self, node: ast.Call) -> RowValue:
        name, owner = getattr(node.func, "id", ""), NONE
        if isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, self._value(node.func.value)
            self._change(node, node.func.value, name)
        given = [self._value(each) for each in node.args]
        named = {each.arg: self._value(each.value) for each in node.keywords}
        found = all_of((*given, *named.values()))
        if self._depth < _MAX_DEPTH and (function := self._resolve(node.func)):
            return self._call_of_script(function, given, named) if found.has_rows else NONE
        if name in ("min", "max") and len(given) > 1 and ALL in given and not is_floor(node):
            self.branches.append(Branch(self._file, node))
        keeps = name in KEEPING or is_along_others(node)
        if owner.is_list:
            return owner if keeps and found.kind is not RowKind.ROW else ALL
        if name in TENSORS or (name == "len" and found.kind is RowKind.ROWS):
            return NONE
        if found.is_list:
            found = CHOSEN if name == "filter" else found
            return owner | (found if keeps else ALL)
        return ALL if found.has_rows and has_key(node, name) else owner | found

    def _change(self, node: ast.Call, owner: ast.expr, name: str) -> None:
        """Note what a method changes in a container, while a loop goes over the rows."""
        names = root_of(owner)
        if not (name in GROWING | CHANGING and self._is_in_rows() and names):
            return
        found = all_of(map(self._value, node.args))
        is_of_some = self._is_of_some_rows()
        if not (found.has_rows or is_of_some):
            return
        value = CHOSEN if is_of_some else ROWS
        if name in CHANGING or not isinstance(owner, ast.Name) or found.kind is RowKind.ALL:
            value = ALL
        self._names[names[0]] = self._names.get(names[0], NONE).or_other(value)

    def _call_of_script(
        self,
        function: FunctionType,
        given: Sequence[RowValue],
        named: Mapping[str | None, RowValue],
    ) -> RowValue:
        definition = definition_of(function)
        if definition is None:
            return all_of((*given, *named.values()))
        names = [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)]
        arguments = dict(zip(names[names[:1] in (["self"], ["cls"]) :], given, strict=False))
        arguments |= {name: value for name, value in named.items() if name}
        file = function.__code__.co_filename
        inner = FunctionRows(file, definition, {}, self._resolve, arguments, self._depth + 1)
        self.branches += inner.branches
        return inner.returned


@dataclass
class _OpenLoop:
    """A loop that is under way."""

    is_over_rows: bool
    carried: frozenset[str]
    """The variables whose values one round reads that an earlier one has set."""
    counters: frozenset[str]
    conditions: list[tuple[ast.If | ast.While, RowValue]] = field(default_factory=list)
    """Under which what happens now in this loop happens."""
