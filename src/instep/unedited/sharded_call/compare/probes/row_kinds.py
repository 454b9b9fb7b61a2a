"""How values of Python code depend on rows of a batch, and what tells that in an expression."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

Position = tuple[int, int, int, int]
"""The first and last line of an expression, and the first and last column there."""


class RowKind(IntEnum):
    """How a value depends on rows."""

    NONE = 0
    ROW = 1
    """It is one row's."""
    ROWS = 2
    """It has an entry for each row."""
    CHOSEN = 3
    """It has the entries of some rows, chosen by their values."""
    ALL = 4
    """It tells of all rows."""


@dataclass(frozen=True)
class RowValue:
    """What is known of a value."""

    kind: RowKind = RowKind.NONE
    loops: frozenset[str] = frozenset()
    """Of one row's: the loops over rows that say which row."""

    def __or__(self, other: RowValue) -> RowValue:
        kinds = {self.kind, other.kind}
        if kinds == {RowKind.ROW}:
            is_pair = self.loops and other.loops and self.loops.isdisjoint(other.loops)
            return ALL if is_pair else RowValue(RowKind.ROW, self.loops | other.loops)
        return (
            ALL if RowKind.ROW in kinds and other.is_list | self.is_list else self.or_other(other)
        )

    def or_other(self, other: RowValue) -> RowValue:
        """What is known of a value that is either of these."""
        return self if self.kind >= other.kind else other

    @property
    def is_list(self) -> bool:
        """Whether it has entries of rows."""
        return self.kind in (RowKind.ROWS, RowKind.CHOSEN)

    @property
    def has_rows(self) -> bool:
        """Whether it depends on any."""
        return self.kind is not RowKind.NONE


NONE, ALL = RowValue(), RowValue(RowKind.ALL)
ROWS, CHOSEN = RowValue(RowKind.ROWS), RowValue(RowKind.CHOSEN)

KEEPING = frozenset(
    (
        *("int", "float", "bool", "str", "abs", "round", "enumerate", "zip", "list", "tuple"),
        *("reversed", "map", "range", "isinstance", "asarray", "array", "exp", "log", "sqrt"),
        *("isnan", "isfinite", "where", "astype", "copy", "tolist", "numpy", "cpu", "item"),
        *("clip", "reshape", "ravel", "flatten", "maximum", "minimum", "filter"),
    )
)
"""Functions and methods whose results have an entry for each one that they are given."""
TENSORS = frozenset(("tensor", "as_tensor", "from_numpy", "stack", "cat"))
"""Functions that return tensors, of which the operations are seen."""
_TOTALS = frozenset(("max", "min", "sorted"))
GROWING = frozenset(("append", "appendleft"))
CHANGING = frozenset(
    ("add", "update", "extend", "insert", "setdefault", "pop", "remove", "discard", "popleft")
)
NO_ENTRIES = frozenset(("shape", "ndim", "dtype", "device"))


def position_of(node: ast.stmt | ast.expr) -> Position:
    """Where a statement or an expression stands."""
    last, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, last, node.col_offset, end


def all_of(values: Iterable[RowValue]) -> RowValue:
    """What is known of a value that is computed from all of these."""
    found = NONE
    for each in values:
        found |= each
    return found


def names_in(node: ast.AST) -> set[str]:
    """The variables that an expression names."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def expressions_in(node: ast.expr) -> Iterator[ast.expr]:
    """Those of which an expression consists."""
    return (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))


def carried_by(node: ast.AST) -> frozenset[str]:
    """The variables that a round of a loop reads before it sets them, or changes."""
    read: dict[str, tuple[int, int]] = {}
    set_at: dict[str, tuple[int, int]] = {}
    changed: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.AugAssign(target=ast.Name(id=name)):
                changed.add(name)
            case ast.Assign(targets=targets, value=value):
                for name in (x for target in targets for x in _targets_of(target)):
                    end = value.end_lineno or 0, value.end_col_offset or 0
                    set_at[name] = min(end, set_at.get(name, end))
            case ast.Name(id=name, ctx=ast.Load()):
                place = each.lineno, each.col_offset
                read[name] = min(place, read.get(name, place))
    return frozenset(changed | {x for x, place in set_at.items() if read.get(x, place) < place})


def _targets_of(target: ast.expr) -> set[str]:
    """The variables that an assignment sets."""
    if isinstance(target, ast.Name):
        return {target.id}
    is_list = isinstance(target, ast.Tuple | ast.List)
    return {x for each in target.elts for x in _targets_of(each)} if is_list else set()  # type: ignore[attr-defined]


def counters_of(target: ast.expr, iterated: ast.expr) -> set[str]:
    """The variables of a loop that count: of `range` and `enumerate`."""
    called = getattr(getattr(iterated, "func", None), "id", "")
    if called == "enumerate" and isinstance(target, ast.Tuple):
        return names_in(target.elts[0])
    return names_in(target) if called == "range" else set()


def is_of_entries(target: ast.expr, iterated: ast.expr) -> bool:
    """Whether a loop over a dict gets more than its keys."""
    method = getattr(getattr(iterated, "func", None), "attr", "")
    return isinstance(target, ast.Tuple) or method == "values"


def is_floor(node: ast.Call) -> bool:
    """Whether this is `max(n, 1)`, which keeps a divisor from zero."""
    is_max = getattr(node.func, "attr", getattr(node.func, "id", "")) == "max"
    numbers = [each.value for each in node.args if isinstance(each, ast.Constant)]
    return is_max and any(isinstance(x, int | float) and x <= 1 for x in numbers)


def is_along_others(node: ast.Call) -> bool:
    """Whether a function of arrays goes along another dimension than the rows."""
    axes = [each.value for each in node.keywords if each.arg in ("axis", "dim")]
    if not axes and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        axes = node.args
    return any(_number(each) not in (None, 0) for each in axes)


def has_key(node: ast.Call, name: str) -> bool:
    """Whether this is `max(rows, key=…)` or the like."""
    return name in _TOTALS and any(each.arg == "key" for each in node.keywords)


def is_one_entry(key: ast.expr) -> bool:
    """Whether this stands for an entry at a certain place: `labels[0]`, `labels[-1]`."""
    return _number(key) is not None


def is_part(key: ast.expr) -> bool:
    """Whether this cuts off entries: `labels[1:]`."""
    return isinstance(key, ast.Slice) and not (key.lower is None and key.upper is None)


def _number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if type(value) is int else None


def first_of(key: ast.expr) -> ast.expr:
    """The part of a key that says which rows."""
    return key.elts[0] if isinstance(key, ast.Tuple) and key.elts else key


def root_of(node: ast.expr) -> Sequence[str]:
    """The variable to which this leads, alone in a list; none if there is no such."""
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return [node.id] if isinstance(node, ast.Name) else []
