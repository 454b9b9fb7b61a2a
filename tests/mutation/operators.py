"""What may be changed in a source, one change at a time: the mutants of a file (pure)."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass

from touched import text_of

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
SYMMETRIC = ("isinstance", "equal", "allclose", "min", "max", "gcd", "maximum", "minimum")
"""Whose first two arguments may be swapped, or cannot."""
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
STRUCTURE = (
    "staticmethod",
    "overload",
    "abstractmethod",
    "override",
    "final",
    "property",
    "contextmanager",
)
"""Decorators without which nothing can be called, or the same, or which type checkers read."""

# What no test can tell, or need not, and why. Everything else is mutated.
UNSEEN_FUNCTIONS = {
    "__repr__": "how an object is shown",
    "__str__": "how an object is shown",
}
UNSEEN_CALLS = {
    "TypeVar": "for type checkers",
    "ParamSpec": "for type checkers",
    "cast": "for type checkers",
}
UNSEEN_KEYWORDS = {
    "frozen": "keeps writers of our own out, and changes nothing for what is right",
    "slots": "saves memory",
    "stacklevel": "which line a warning shows",
    "strict": "an assertion of ours about two lengths, in zip",
    "maxsize": "how much a cache may hold",
    "name": "how a thread is shown",
    "flush": "of what the core prints, all goes to stderr, which Python writes line by line anyway",
}
UNSEEN_CONSTANTS = {
    "_SECONDS": "how long or how often one waits or looks: a matter of speed",
    "_BYTES": "from which size on another way is taken: a matter of speed, the result is the same",
    "_SPINS": "how long one waits before one sleeps: a matter of speed",
    "_SHARE": "how long one sleeps: a matter of speed",
    "_MOMENT": "how often one looks",
    "_FIRST": "how often one looks",
    "_LONGEST": "how often one looks",
    "_ALIGNMENT": "cache lines: a matter of speed",
    "_REMEMBERED": "a cap on memory; one more is as good",
    "_MAX_BLOCKS": "a cap on memory; one more is as good",
    "_MAX_DRAWS": "a cap on memory; one more is as good",
    "_KEPT_VIEWS": "a cap on memory; one more is as good",
    "_LOOKED_AT": "a cap on time; one more is as good",
    "_ENTRIES": "a cap on time; one more is as good",
    "_TRIED": "how many batches are timed; one more is as good",
    "_DIRECTIONS": "how many projections are compared; one more is as good",
    "LARGE": "from which size on another way is taken: a matter of speed",
    "SAMPLES": "which calls are proven again; one more is as good",
    "MESSAGE_BYTES": "in what pieces a message travels: the result is the same",
}
"""Constants of a module, by how their names end: one more or less changes no result."""
UNSEEN_DECORATORS = {
    "cache": "computes again what it has computed",
    "lru_cache": "computes again what it has computed",
}


@dataclass(frozen=True)
class Mutant:
    """One change: these bytes of the file become others.

    `function` and `statement` say where, in words that hold when lines have moved.
    """

    path: str
    line: int
    function: str
    statement: str
    change: str
    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes | None:
        """The source with the change; None if Python cannot compile that."""
        changed = source[: self.start] + self.text.encode() + source[self.end :]
        try:
            compile(changed, self.path, "exec")
        except SyntaxError:
            return None
        return changed


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of the text; a few are none that Python can compile."""
    found = _Finder(path, source)
    found.block(ast.parse(source), "")
    unique = {(m.start, m.end, m.text): m for m in found.mutants}
    return sorted(unique.values(), key=lambda m: (m.start, m.end, m.text))


class _Finder:
    """Walks a file and notes what may be changed in it."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.mutants: list[Mutant] = []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._function, self._statement = "", ""

    def block(self, node: ast.AST, function: str) -> None:
        """Mutate the statements of a module, a class, a function or a compound statement."""
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            for position, statement in enumerate(inner if isinstance(inner, list) else ()):
                docstring = position == 0 and isinstance(statement, ast.Expr)
                if not (docstring and isinstance(statement.value, ast.Constant)):
                    self.statement(statement, function)
        for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self.block(handler, function)

    def statement(self, node: ast.stmt, function: str) -> None:
        """Mutate a statement, and those in it."""
        self._function, self._statement = function, text_of(node)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._definition(node, function)
            case ast.ClassDef():
                self._decorators(node)
                self.block(node, f"{function}{node.name}.")
            case ast.If():
                if "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(
                    node.test
                ):
                    return
                self._condition(node.test)
                self.block(node, function)
            case ast.While():
                self._condition(node.test, also_true=False)
                self.block(node, function)
            case ast.For():
                self._replace(node.iter, "()", "loop skipped")
                self.expression(node.iter)
                self.block(node, function)
            case ast.With():
                for item in node.items:
                    if item.optional_vars is None:
                        nothing = '__import__("contextlib").nullcontext()'
                        self._replace(item.context_expr, nothing, "`with` left out")
                    self.expression(item.context_expr)
                self.block(node, function)
            case ast.Try() | ast.Match():
                self.block(node, function)
            case ast.Break():
                self._replace(node, "continue", "break: continue")
            case ast.Continue():
                self._replace(node, "break", "continue: break")
            case ast.Assert() | ast.Global() | ast.Nonlocal() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                self._simple(node, at_top=not function or function.endswith("."))

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef, function: str) -> None:
        if node.name in UNSEEN_FUNCTIONS or _names(node.decorator_list) & {"overload"}:
            return
        if _is_ellipsis(node.body[-1]):
            return
        self._decorators(node)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.expression(default)
        self.block(node, f"{function.removesuffix('.') + '.' if function else ''}{node.name}")

    def _decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            name = min(_names([decorator]), default="")
            if name in STRUCTURE or name in UNSEEN_DECORATORS:
                continue
            nothing = "(lambda it: it)"
            if isinstance(decorator, ast.Call):
                self.expression(decorator)
            self._replace(decorator, nothing, "decorator left out")

    def _simple(self, node: ast.stmt, at_top: bool) -> None:
        match node:
            case ast.Raise() if node.exc and _names([node.exc]) == {"AssertionError"}:
                return
            case ast.Raise():
                self._replace(node, "pass", "raise left out")
                return  # what an error says is not looked at
            case ast.Return(value=ast.expr() as value):
                if not (isinstance(value, ast.Constant) and value.value in (None, False)):
                    self._replace(node, "return None", "value not returned")
            case ast.Expr(value=ast.Yield() | ast.YieldFrom() | ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return
            case ast.Assign(targets=[target]) if at_top and ast.unparse(target).rstrip(
                ")"
            ).endswith(tuple(UNSEEN_CONSTANTS)):
                return
            case ast.Assign() | ast.AnnAssign() if at_top:
                pass  # left out, the file cannot be imported
            case ast.AnnAssign(value=None):
                return
            case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Delete():
                self._replace(node, "pass", "statement left out")
            case _:
                return
        if isinstance(node, ast.AugAssign) and type(node.op) in CALCULATED:
            changed = copy.copy(node)
            changed.op = CALCULATED[type(node.op)]()
            self._replace(node, changed, "another operator")
        for field in ("value", "targets", "target"):
            inner = getattr(node, field, None)
            for value in inner if isinstance(inner, list) else [inner]:
                if isinstance(value, ast.expr):
                    self.expression(value)

    def _condition(self, node: ast.expr, also_true: bool = True) -> None:
        if also_true:
            self._replace(node, "True", "condition always true")
        self._replace(node, "False", "condition always false")
        self.expression(node)

    def expression(self, node: ast.AST) -> None:
        """Mutate an expression, and those in it."""
        match node:
            case ast.JoinedStr() | ast.Lambda(body=ast.JoinedStr()):
                return  # positions in f-strings are not the file's
            case ast.Call() if _names([node.func]) & UNSEEN_CALLS.keys() or _is_error(node.func):
                return
            case ast.Call(func=ast.Attribute(value=value)) if _is_error(value):
                return
            case ast.Call():
                self._call(node)
            case ast.Compare():
                for at, compared in enumerate(node.ops):
                    changed = copy.copy(node)
                    changed.ops = [*node.ops]
                    changed.ops[at] = COMPARED[type(compared)]()
                    self._replace(node, changed, "another comparison")
            case ast.BinOp() if type(node.op) in CALCULATED:
                if not _is_text(node.left):
                    changed_op = copy.copy(node)
                    changed_op.op = CALCULATED[type(node.op)]()
                    self._replace(node, changed_op, "another operator")
            case ast.BoolOp():
                changed_bool = copy.copy(node)
                changed_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                self._replace(node, changed_bool, "`and`: `or`, or back")
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                self._replace(node, node.operand, "`not` or minus left out")
            case ast.IfExp():
                self._condition(node.test)
                self.expression(node.body)
                self.expression(node.orelse)
                return
            case ast.comprehension():
                for test in node.ifs:
                    self._replace(test, "True", "condition always true")
            case ast.Slice():
                if node.lower is not None and node.upper is not None:
                    for side in ("lower", "upper"):
                        changed_slice = copy.copy(node)
                        setattr(changed_slice, side, None)
                        self._replace(node, changed_slice, f"slice without its {side} end")
            case ast.Constant():
                self._constant(node)
            case ast.Lambda():
                self.expression(node.body)
                return
        for child in ast.iter_child_nodes(node):
            if not _is_unseen(child):
                self.expression(child)

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CALLED:
            self._replace(node.func, CALLED[node.func.id], "another function")
        plain = not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        if len(node.args) >= 2 and plain and _names([node.func]).isdisjoint(SYMMETRIC):
            changed = copy.copy(node)
            changed.args = [node.args[1], node.args[0], *node.args[2:]]
            self._replace(node, changed, "arguments swapped")
        for at, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNSEEN_KEYWORDS:
                changed = copy.copy(node)
                changed.keywords = [*node.keywords[:at], *node.keywords[at + 1 :]]
                self._replace(node, changed, f"without {keyword.arg}=")

    def _constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool():
                self._replace(node, str(not node.value), "another constant")
            case int() | float():
                self._replace(node, str(node.value + 1), "another constant")

    def _replace(
        self, node: ast.stmt | ast.expr | ast.Slice, new: str | ast.AST, change: str
    ) -> None:
        start, end = (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno or 0, node.end_col_offset or 0),
        )
        text = new if isinstance(new, str) else ast.unparse(new)
        breaks = "\n" * ((node.end_lineno or 0) - node.lineno)
        if isinstance(node, ast.stmt):
            text += breaks
        elif not isinstance(node, ast.Slice):
            text = f"({text}{breaks})"
        place = (self.path, node.lineno, self._function, self._statement)
        self.mutants.append(Mutant(*place, change, start, end, text))

    def _at(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column


def _names(nodes: list[ast.expr]) -> set[str]:
    """The last part of each name: `a.b.c(x)` is called `c`."""
    names = set()
    for node in nodes:
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute):
            names.add(called.attr)
        elif isinstance(called, ast.Name):
            names.add(called.id)
    return names


def _is_unseen(node: ast.AST) -> bool:
    """Whether this is `frozen=True` or its like: another constant is as good as none."""
    is_keyword = isinstance(node, ast.keyword) and node.arg in UNSEEN_KEYWORDS
    return is_keyword and isinstance(node.value, ast.Constant)


def _is_error(node: ast.expr) -> bool:
    """Whether this is the class of an error, whose words are put together from what follows."""
    return isinstance(node, ast.Name) and node.id.endswith(("Error", "Warning"))


def _is_ellipsis(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and value.value is ...


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
