"""Which code runs in every process, where the script starts its processes itself."""

from __future__ import annotations

import ast
from functools import cached_property

from instep.check.script import Function, Script, keyword


class Processes:
    """The call that starts the ranks, and what they reach from there."""

    def __init__(self, script: Script) -> None:
        self.script = script

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
    def main(self) -> Function | None:
        """The function that each spawned process runs."""
        return self.spawned(self.spawn) if self.spawn is not None else None

    @cached_property
    def _per_rank(self) -> set[Function] | None:
        if self.spawn is None:
            return None
        first = self.main
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

    def run(self, node: ast.AST) -> bool:
        """False for what the parent does before it spawns the ranks."""
        return self._per_rank is None or self.script.function_of(node) in self._per_rank
