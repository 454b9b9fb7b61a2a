"""The processes that a script starts by itself, and the functions that they run."""

from __future__ import annotations

import ast
from functools import cached_property

from instep.check.script import Function, Script, keyword


class SpawnedProcesses:
    """The call that starts the ranks, and the functions that they reach."""

    def __init__(self, script: Script) -> None:
        self.script = script

    @cached_property
    def spawn(self) -> ast.Call | None:
        """The call that starts the processes from inside the script, if it does so."""
        for call in self.script.calls_named("spawn", "Process", "start_processes"):
            full = self.script.full_name(call)
            if "multiprocessing" in full and self.spawn_target(call) is not None:
                return call
        return None

    def spawn_target(self, call: ast.Call) -> Function | None:
        """The function of this script that a spawn call starts."""
        target = keyword(call, "target") or keyword(call, "fn", 0)
        word = self.script.dotted_name(target)
        return self.script.functions.get(word, [None])[0]

    @cached_property
    def main(self) -> Function | None:
        """The function that each spawned process runs."""
        return self.spawn_target(self.spawn) if self.spawn is not None else None

    @cached_property
    def _per_rank(self) -> set[Function] | None:
        """All functions that the spawned function mentions by name, directly or indirectly."""
        if self.spawn is None:
            return None
        mentioned: dict[Function | None, set[str]] = {}
        for name in self.script.all(ast.Name):
            mentioned.setdefault(self.script.function_of(name), set()).add(name.id)
        for attribute in self.script.all(ast.Attribute):
            function = self.script.function_of(attribute)
            mentioned.setdefault(function, set()).add(attribute.attr)
        found: set[Function] = set()
        waiting = [self.main] if self.main else []
        while waiting:
            function = waiting.pop()
            found.add(function)
            for word in mentioned.get(function, ()):
                waiting += [f for f in self.script.functions.get(word, []) if f not in found]
        return found

    def runs_on_ranks(self, node: ast.AST) -> bool:
        """Whether the ranks run this node, and not only the parent that spawns them."""
        function = self.script.function_of(node)
        if function in self._launching:
            return False
        return self._per_rank is None or function in self._per_rank

    @cached_property
    def _launching(self) -> set[Function | None]:
        """Functions that start Python by `subprocess.Popen`, once for each rank."""
        return {
            function
            for call in self.script.calls_of("subprocess.Popen")
            if (function := self.script.function_of(call)) is not None
            and any(self.script.parent_loops(call))
            and "sys.executable" in self.script.source(call)
        }
