"""Which code runs on which ranks: expressions that are a rank, tests on it, guards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from instep.check.origins import Origins
from instep.check.script import Function, Script, constant, keyword

Kind = Literal["rank", "local rank", "device"]
"""`device`: an index of a device, or rank modulo devices; 0 on one process of each node."""

GLOBAL_RANK = re.compile(
    r"^(global_?|world_?|ddp_|dist_|my_?|proc_?|process_)?(rank|rank_id|proc_?id|process_index)$"
)
LOCAL_RANK = re.compile(r"local_?(rank|procid|process_index|id)$")
DEVICE = re.compile(r"^(gpu|gpu_?id|device_?id|proc_?nr|process_nr)$")
MAIN = re.compile(
    r"(main_?(proc|rank|node)|^(is_)?main$|is_main|master|primary|rank_?zero|rank_?0|is_chief"
    r"|is_root|single_process|first_rank)",
    re.IGNORECASE,
)
NOT_MAIN = re.compile(r"master_(addr|port|param|weight|grad|ip|uri|node_addr)", re.IGNORECASE)
RANK_VARIABLES = {
    "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "PMIX_RANK",
}  # fmt: skip
LOCAL_RANK_VARIABLES = {
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "HOROVOD_LOCAL_RANK",
}  # fmt: skip
SIZE_VARIABLES = {
    "WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
    "HOROVOD_SIZE",
}  # fmt: skip
SIZE = re.compile(
    r"^(world_?size|num_?(replicas|processes|ranks)|ddp_world_size|global_world_size)$"
)


@dataclass(frozen=True)
class Guard:
    """A test that comes out differently on different ranks, and the side that is meant."""

    kind: Kind
    zero: bool
    """True: the code runs on the first rank only; False: on all the others."""
    test: ast.AST


class Ranks:
    """What a script knows of its own rank."""

    def __init__(self, script: Script, origins: Origins) -> None:
        self.script = script
        self.origins = origins
        self._guards: dict[ast.AST, list[Guard]] = {}

    # --- expressions

    def kind(self, node: ast.AST | None, depth: int = 3) -> Kind | None:
        """Whether an expression is a rank of the job, of its node, or a device; None: neither."""
        if isinstance(node, ast.Call):
            return self._kind_of_call(node, depth)
        if isinstance(node, ast.Subscript):
            return _kind_of_variable(read_variable(self.script, node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return "device" if depth and self.kind(node.left, depth - 1) else None
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        word = self.script.dotted(node).split(".")[-1].lower()
        if LOCAL_RANK.search(word):
            return "local rank"
        if GLOBAL_RANK.match(word):
            return "rank"
        if depth and isinstance(node, ast.Name):
            for binding in self.origins.bindings(node):
                if found := self.kind(binding.value, depth - 1):
                    return found
        return "device" if DEVICE.match(word) else None

    def _kind_of_call(self, call: ast.Call, depth: int) -> Kind | None:
        word = self.script.called(call)
        if word in {"int", "str", "getattr"} and call.args:
            if word == "getattr" and len(call.args) > 1:
                name = constant(call.args[1])
                return self._kind_of_word(name) if isinstance(name, str) else None
            return self.kind(call.args[0], depth)
        return _kind_of_variable(read_variable(self.script, call)) or self._kind_of_word(
            word.removeprefix("get_")
        )

    def _kind_of_word(self, word: str) -> Kind | None:
        if LOCAL_RANK.search(word):
            return "local rank"
        return "rank" if GLOBAL_RANK.match(word) else None

    def is_world_size(self, node: ast.AST | None, depth: int = 3) -> bool:
        """Whether an expression is the number of processes of the job."""
        if isinstance(node, ast.Call):
            if self.script.called(node) in {"int", "float"} and node.args:
                return self.is_world_size(node.args[0], depth)
            full = self.script.full_name(node)
            return (
                self.script.called(node) == "get_world_size"
                or full in {"horovod.torch.size", "instep.world_size"}
                or read_variable(self.script, node) in SIZE_VARIABLES
            )
        if isinstance(node, ast.Subscript):
            return read_variable(self.script, node) in SIZE_VARIABLES
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        if SIZE.match(self.script.dotted(node).split(".")[-1].lower()):
            return True
        return depth > 0 and any(
            self.is_world_size(b.value, depth - 1) for b in self.origins.bindings(node)
        )

    def mentions_rank(self, node: ast.expr | None) -> bool:
        """Whether a value depends on the rank, as in `f"rank{rank}.csv"`."""
        if node is None:
            return False
        words = re.findall(r"\w+", self.origins.text(node))
        return any("rank" in word.lower() or "proc" in word.lower() for word in words) or any(
            self.kind(inner) for inner in ast.walk(node)
        )

    # --- tests

    def test(self, node: ast.AST | None, depth: int = 3) -> Guard | None:
        """What a condition says of the rank; None when it says nothing."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.test(node.operand, depth)
            if inner is not None:
                return Guard(inner.kind, not inner.zero, inner.test)
            kind = self.kind(node.operand)
            return Guard(kind, True, node) if kind else None
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
            return self._compare_with_none(left, isinstance(op, ast.IsNot), right, depth)
        kind = self.kind(left)
        if kind is None and isinstance(op, ast.Eq | ast.NotEq):
            left, right = right, left
            kind = self.kind(left)
        if kind is None:
            return None
        if isinstance(op, ast.In | ast.NotIn):
            members = [constant(m) for m in getattr(right, "elts", [])]
            return Guard(kind, (0 in members) == isinstance(op, ast.In), node)
        value = constant(right)
        if value == -1:
            return None  # the old sign for "not distributed": the same on every rank
        if value == 0 and isinstance(op, ast.GtE | ast.Lt):
            return None  # "distributed" and "not distributed" again
        if isinstance(op, ast.Eq):
            return Guard(kind, value in (0, None), node)
        if isinstance(op, ast.NotEq | ast.Gt | ast.GtE):
            return Guard(kind, False, node)
        return Guard(kind, True, node)

    def _compare_with_none(
        self, left: ast.expr, is_not: bool, right: ast.expr, depth: int
    ) -> Guard | None:
        """`writer is not None`, where the writer is made on one rank only."""
        if not (isinstance(right, ast.Constant) and right.value is None) or depth == 0:
            return None
        guard = self._made_under_guard(left, depth - 1)
        return Guard(guard.kind, guard.zero == is_not, left) if guard else None

    def _made_under_guard(self, node: ast.AST, depth: int) -> Guard | None:
        sources = [node, *self.origins.arguments_of(node)]
        for binding in (b for source in sources for b in self.origins.bindings(source)):
            if getattr(binding.statement, "lineno", 0) >= getattr(node, "lineno", 0) and (
                self.script.function_of(binding.statement) is self.script.function_of(node)
            ):
                continue  # made later
            if constant(binding.value) is None and not isinstance(binding.value, ast.Constant):
                for guard in self.guards(binding.statement):
                    return guard
                if isinstance(binding.value, ast.IfExp):
                    return self.test(binding.value.test, depth) if depth else None
        return None

    def _flag(self, node: ast.AST | None, depth: int) -> Guard | None:
        word = self.script.called(node) if isinstance(node, ast.Call) else self.script.dotted(node)
        last = word.split(".")[-1]
        if last and MAIN.search(last) and not NOT_MAIN.search(last):
            kind: Kind = "local rank" if "local" in last else "rank"
            return Guard(kind, True, node or self.script.tree)
        if depth == 0 or not isinstance(node, ast.Name | ast.Attribute):
            return None
        for binding in self.origins.bindings(node):
            if isinstance(binding.value, ast.Compare | ast.BoolOp | ast.Call | ast.UnaryOp):
                found = self.test(binding.value, depth - 1)
                if found:
                    return found
        return self._made_under_guard(node, depth - 1)

    # --- guards

    def guards(self, node: ast.AST) -> list[Guard]:
        """The tests on the rank that decide, within its function, whether the node runs."""
        if node not in self._guards:
            self._guards[node] = []  # a node that is asked for while it is being answered
            self._guards[node] = list(self._find_guards(node))
        return self._guards[node]

    def _find_guards(self, node: ast.AST) -> Iterator[Guard]:
        child = node
        for above in self.script.ancestors(node):
            if isinstance(above, ast.If | ast.IfExp):
                yield from self._side(above, child)
            if isinstance(above, ast.BoolOp) and child is not above.values[0]:
                before = above.values[: above.values.index(child)]  # type: ignore[arg-type]
                for value in before:
                    if (guard := self.test(value)) and isinstance(above.op, ast.And):
                        yield guard
            if isinstance(above, ast.With):
                yield from self._scope(above)
            yield from self._left_early(above, child)
            if isinstance(above, Function):
                yield from self._decorated(above)
                return
            child = above

    def _side(self, test: ast.If | ast.IfExp, child: ast.AST) -> Iterator[Guard]:
        guard = self.test(test.test)
        if guard is None or child is test.test:
            return
        body = test.body if isinstance(test.body, list) else [test.body]
        if any(child is part for part in body):
            yield guard
        elif not isinstance(test.test, ast.BoolOp):
            yield Guard(guard.kind, not guard.zero, guard.test)

    def _scope(self, scope: ast.With) -> Iterator[Guard]:
        for item in scope.items:
            if "single_process_scope" in self.script.called(item.context_expr):
                yield Guard("rank", True, item.context_expr)

    def _left_early(self, block: ast.AST, child: ast.AST) -> Iterator[Guard]:
        """After `if rank != 0: return` the rest of the block runs on rank 0 only."""
        for statements in (getattr(block, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(statements, list) or child not in statements:
                continue
            for before in statements[: statements.index(child)]:
                if isinstance(before, ast.If) and not before.orelse and _leaves(before.body):
                    guard = self.test(before.test)
                    if guard and not isinstance(before.test, ast.BoolOp):
                        yield Guard(guard.kind, not guard.zero, guard.test)

    def _decorated(self, function: Function) -> Iterator[Guard]:
        for decorator in function.decorator_list:
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            last = self.script.dotted(made).split(".")[-1]
            if MAIN.search(last):
                yield Guard("rank", True, decorator)

    def guard_of_call(self, node: ast.AST, depth: int = 4) -> Guard | None:
        """A guard here, or around every call of the function that the node is in."""
        here = self.guards(node)
        if here:
            return here[0]
        function = self.script.function_of(node)
        if function is None or depth == 0:
            return None
        calls = self.origins.calls_of(function)
        found = [self.guard_of_call(call, depth - 1) for call in calls]
        return found[0] if found and all(found) else None

    # --- where the ranks run

    @cached_property
    def spawn(self) -> ast.Call | None:
        """The call that starts the processes from inside the script, if it does so."""
        for call in self.script.calls_named("spawn", "Process", "start_processes"):
            full = self.script.full_name(call)
            if "multiprocessing" in full and self.spawned(call) is not None:
                return call
        return None

    def spawned(self, call: ast.Call) -> Function | None:
        """The function of this script that a spawn call starts."""
        target = keyword(call, "target") or keyword(call, "fn", 0)
        word = self.script.dotted(target)
        return self.script.functions.get(word, [None])[0]

    @cached_property
    def _per_rank(self) -> set[Function] | None:
        if self.spawn is None:
            return None
        first = self.spawned(self.spawn)
        found: set[Function] = set()
        waiting = [first] if first else []
        while waiting:
            function = waiting.pop()
            if function in found:
                continue
            found.add(function)
            for inner in ast.walk(function):
                if isinstance(inner, ast.Name | ast.Attribute):
                    word = self.script.dotted(inner).split(".")[-1]
                    waiting += self.script.functions.get(word, [])
        return found

    def runs_on_every_rank(self, node: ast.AST) -> bool:
        """False for what the parent does before it spawns the ranks."""
        return self._per_rank is None or self.script.function_of(node) in self._per_rank


def _leaves(statements: list[ast.stmt]) -> bool:
    return isinstance(statements[-1], ast.Return | ast.Continue | ast.Break)


def read_variable(script: Script, node: ast.AST) -> str:
    """The name in os.environ["NAME"], os.environ.get("NAME") or os.getenv("NAME")."""
    if isinstance(node, ast.Subscript):
        if script.full_name(node.value) == "os.environ":
            name = constant(node.slice)
            return name if isinstance(name, str) else ""
    elif isinstance(node, ast.Call) and node.args:
        function = script.full_name(node)
        if function in {"os.getenv", "os.environ.get", "os.environ.pop"}:
            name = constant(node.args[0])
            return name if isinstance(name, str) else ""
    return ""


def _kind_of_variable(name: str) -> Kind | None:
    if name in RANK_VARIABLES:
        return "rank"
    return "local rank" if name in LOCAL_RANK_VARIABLES else None


