"""Guards: conditions on the rank, by which code runs on some ranks only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from instep.check.origins import Origins
from instep.check.rank_expressions import RankExpressions, RankType
from instep.check.script import Function, Script, constant

MAIN = re.compile(
    r"(main_?(proc|rank|node)|^(is_)?main$|is_main|master|primary|rank_?zero|rank_?0|is_chief"
    r"|is_root|single_process|first_rank)",
    re.IGNORECASE,
)
NOT_MAIN = re.compile(r"master_(addr|port|param|weight|grad|ip|uri|node_addr)", re.IGNORECASE)


@dataclass(frozen=True)
class Guard:
    """A condition that differs by rank, and the side of it on which the code is."""

    rank_type: RankType
    on_rank_0: bool = field(kw_only=True)
    """True: the code runs on the first rank only; False: on all the others."""
    test: ast.AST
    holds: bool = field(default=True, kw_only=True)
    """False: the code runs where the test fails (an `else`, or after `if rank != 0: return`)."""

    def inverted(self) -> Guard:
        """The guard of the other branch."""
        return Guard(self.rank_type, self.test, on_rank_0=not self.on_rank_0, holds=not self.holds)

    @property
    def condition(self) -> str:
        """The condition as text: "rank == 0"."""
        test = ast.unparse(self.test)
        if self.holds:
            return test
        if isinstance(self.test, ast.Compare) and isinstance(self.test.ops[0], ast.NotEq):
            return test.replace("!=", "==", 1)
        return f"not {test}" if isinstance(self.test, ast.Name) else f"not ({test})"

    @property
    def is_scope(self) -> bool:
        """Whether it is `single_process_scope`, inside of which there is a world of one."""
        return "single_process_scope" in ast.unparse(self.test)


class RankGuards:
    """Finds the conditions on the rank under which a place in the script is reached."""

    def __init__(self, script: Script, origins: Origins, ranks: RankExpressions) -> None:
        self.script = script
        self.origins = origins
        self.ranks = ranks
        self._cache: dict[ast.AST, list[Guard]] = {}

    # --- tests

    def test(self, node: ast.AST | None, depth: int = 3) -> Guard | None:
        """The guard that a condition is; None if it does not depend on the rank."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.test(node.operand, depth)
            if inner is not None:
                return Guard(inner.rank_type, inner.test, on_rank_0=not inner.on_rank_0)
            rank_type = self.ranks.rank_type(node.operand)
            return Guard(rank_type, node, on_rank_0=True) if rank_type else None
        if isinstance(node, ast.BoolOp):
            found = [g for value in node.values if (g := self.test(value, depth)) is not None]
            return found[0] if found else None
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        return self._flag(node, depth)

    def _compare(self, node: ast.Compare, depth: int) -> Guard | None:
        if len(node.ops) != 1:
            return None
        left, op, right = node.left, node.ops[0], node.comparators[0]
        if isinstance(op, ast.Is | ast.IsNot):
            return self._compare_with_none(node, depth)
        rank_type = self.ranks.rank_type(left)
        if rank_type is None and isinstance(op, ast.Eq | ast.NotEq):
            left, right = right, left
            rank_type = self.ranks.rank_type(left)
        if rank_type is None:
            return None
        if isinstance(op, ast.In | ast.NotIn):
            members = [constant(m) for m in getattr(right, "elts", [])]
            return Guard(rank_type, node, on_rank_0=(0 in members) == isinstance(op, ast.In))
        value = constant(right)
        if value == -1:
            return None  # the old value for "not distributed": the same on every rank
        if value == 0 and isinstance(op, ast.GtE | ast.Lt):
            return None  # "distributed" and "not distributed" again
        if isinstance(op, ast.Eq):
            return Guard(rank_type, node, on_rank_0=value in (0, None))
        if isinstance(op, ast.NotEq | ast.Gt | ast.GtE):
            return Guard(rank_type, node, on_rank_0=False)
        return Guard(rank_type, node, on_rank_0=True)

    def _compare_with_none(self, node: ast.Compare, depth: int) -> Guard | None:
        """`writer is not None`, where the writer is made on one rank only."""
        other = node.comparators[0]
        if not (isinstance(other, ast.Constant) and other.value is None) or depth == 0:
            return None
        guard = self._made_under_guard(node.left, depth - 1)
        is_not = isinstance(node.ops[0], ast.IsNot)
        return Guard(guard.rank_type, node, on_rank_0=guard.on_rank_0 == is_not) if guard else None

    def _made_under_guard(self, node: ast.AST, depth: int) -> Guard | None:
        sources = [node, *self.origins.arguments_of(node)]
        for binding in (b for source in sources for b in self.origins.bindings(source)):
            if getattr(binding.statement, "lineno", 0) >= getattr(node, "lineno", 0) and (
                self.script.function_of(binding.statement) is self.script.function_of(node)
            ):
                continue  # made later
            if constant(binding.value) is None and not isinstance(binding.value, ast.Constant):
                for guard in self.local_guards(binding.statement):
                    return guard
                if isinstance(binding.value, ast.IfExp):
                    return self.test(binding.value.test, depth) if depth else None
        return None

    def _flag(self, node: ast.AST | None, depth: int) -> Guard | None:
        word = (
            self.script.call_name(node)
            if isinstance(node, ast.Call)
            else self.script.dotted_name(node)
        )
        last = word.split(".")[-1]
        if last and MAIN.search(last) and not NOT_MAIN.search(last):
            rank_type: RankType = "local rank" if "local" in last else "rank"
            return Guard(rank_type, node or self.script.tree, on_rank_0=True)
        if depth == 0 or not isinstance(node, ast.Name | ast.Attribute):
            return None
        for binding in self.origins.bindings(node):
            if isinstance(binding.value, ast.Compare | ast.BoolOp | ast.Call | ast.UnaryOp):
                found = self.test(binding.value, depth - 1)
                if found:
                    return found
        return self._made_under_guard(node, depth - 1)

    # --- guards

    def local_guards(self, node: ast.AST) -> list[Guard]:
        """The guards, within its function, under which the node runs."""
        if node not in self._cache:
            self._cache[node] = []  # ends the recursion if the node depends on itself
            self._cache[node] = list(self._find_guards(node))
        return self._cache[node]

    def _find_guards(self, node: ast.AST) -> Iterator[Guard]:
        child = node
        for above in self.script.ancestors(node):
            if isinstance(above, ast.If | ast.IfExp):
                yield from self._branch_guards(above, child)
            if isinstance(above, ast.BoolOp) and child is not above.values[0]:
                before = above.values[: above.values.index(child)]  # type: ignore[arg-type]
                for value in before:
                    if (guard := self.test(value)) and isinstance(above.op, ast.And):
                        yield guard
            if isinstance(above, ast.With):
                yield from self._scope_guards(above)
            yield from self._early_exit(above, child)
            if isinstance(above, Function):
                yield from self._decorator_guards(above)
                return
            child = above

    def _branch_guards(self, test: ast.If | ast.IfExp, child: ast.AST) -> Iterator[Guard]:
        guard = self.test(test.test)
        if guard is None or child is test.test:
            return
        body = test.body if isinstance(test.body, list) else [test.body]
        if any(child is part for part in body):
            yield guard
        elif not isinstance(test.test, ast.BoolOp):
            yield guard.inverted()

    def _scope_guards(self, scope: ast.With) -> Iterator[Guard]:
        for item in scope.items:
            if "single_process_scope" in self.script.call_name(item.context_expr):
                yield Guard("rank", item.context_expr, on_rank_0=True)

    def _early_exit(self, block: ast.AST, child: ast.AST) -> Iterator[Guard]:
        """After `if rank != 0: return` the rest of the block runs on rank 0 only."""
        for statements in (getattr(block, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(statements, list) or child not in statements:
                continue
            for before in statements[: statements.index(child)]:
                if isinstance(before, ast.If) and not before.orelse and _ends_block(before.body):
                    guard = self.test(before.test)
                    if guard and not isinstance(before.test, ast.BoolOp):
                        yield guard.inverted()

    def _decorator_guards(self, function: Function) -> Iterator[Guard]:
        for decorator in function.decorator_list:
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            last = self.script.dotted_name(made).split(".")[-1]
            if MAIN.search(last):
                yield Guard("rank", decorator, on_rank_0=True)

    def effective_guard(self, node: ast.AST, depth: int = 4) -> Guard | None:
        """A guard of the node, or one that every call of its function has."""
        here = self.local_guards(node)
        if here:
            return here[0]
        function = self.script.function_of(node)
        if function is None or depth == 0:
            return None
        calls = self.origins.calls_of(function)
        found = [self.effective_guard(call, depth - 1) for call in calls]
        return found[0] if found and all(found) else None


def _ends_block(statements: list[ast.stmt]) -> bool:
    return isinstance(statements[-1], ast.Return | ast.Continue | ast.Break)
