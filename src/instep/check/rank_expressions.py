"""Expressions that are a rank, or the number of ranks."""

from __future__ import annotations

import ast
import re
from typing import Literal

from instep.check.origins import Origins
from instep.check.script import Script, constant

RankType = Literal["rank", "local rank", "device"]
"""`device`: an index of a device, or rank modulo devices; 0 on one process of each node."""

GLOBAL_RANK = re.compile(
    r"^(global_?|world_?|ddp_|dist_|my_?|proc_?|process_)?(rank|rank_id|proc_?id|process_index)$"
)
LOCAL_RANK = re.compile(r"local_?(rank|procid|process_index|id)$")
DEVICE = re.compile(r"^(gpu|gpu_?id|device_?id|proc_?nr|process_nr)$")
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
_PROCESS = {"rank", "pid", "getpid", "procid", "hostname", "gethostname"}
"""Words that make a file name or a line of output that of one process."""
SIZE = re.compile(
    r"^(world_?size|num_?(replicas|processes|ranks)|ddp_world_size|global_world_size)$"
)


class RankExpressions:
    """Recognises ranks and world sizes by names, calls and environment variables."""

    def __init__(self, script: Script, origins: Origins) -> None:
        self.script = script
        self.origins = origins

    @property
    def on_rank_0(self) -> str:
        """How this script may ask whether it is rank 0.

        torch.distributed.get_rank() fails under plain `python`, where there is no process group;
        the libraries that a script imports for several processes know better.
        """
        roots = self.script.imported_roots
        if "accelerate" in roots and not roots & {"instep", "horovod"}:
            return "accelerator.is_main_process"
        return f"{self.rank} == 0"

    @property
    def rank(self) -> str:
        """The expression for the rank in this script, of the library that it imports."""
        return self._choose("instep.rank", "hvd.rank()", "torch.distributed.get_rank()")

    @property
    def world_size(self) -> str:
        """The expression for the number of processes."""
        return self._choose("instep.world_size", "hvd.size()", "torch.distributed.get_world_size()")

    def _choose(self, of_instep: str, of_horovod: str, of_torch: str) -> str:
        roots = self.script.imported_roots
        if "instep" in roots:
            return of_instep
        return of_horovod if "horovod" in roots else of_torch

    def rank_type(self, node: ast.AST | None, depth: int = 3) -> RankType | None:
        """Whether an expression is a rank of the job, of its node, or a device; None: neither."""
        if isinstance(node, ast.Call):
            return self._type_of_call(node, depth)
        if isinstance(node, ast.Subscript):
            return _type_of_variable(read_variable(self.script, node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return "device" if depth and self.rank_type(node.left, depth - 1) else None
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        word = self.script.dotted_name(node).split(".")[-1].lower()
        if found := _type_of_word(word):
            return found
        if depth and isinstance(node, ast.Name):
            for binding in self.origins.bindings(node):
                if found := self.rank_type(binding.value, depth - 1):
                    return found
        return "device" if DEVICE.match(word) else None

    def _type_of_call(self, call: ast.Call, depth: int) -> RankType | None:
        word = self.script.call_name(call)
        if word in {"int", "str", "getattr"} and call.args:
            if word == "getattr" and len(call.args) > 1:
                name = constant(call.args[1])
                return _type_of_word(name) if isinstance(name, str) else None
            return self.rank_type(call.args[0], depth)
        variable = read_variable(self.script, call)
        return _type_of_variable(variable) or _type_of_word(word.removeprefix("get_"))

    def is_world_size(self, node: ast.AST | None, depth: int = 3) -> bool:
        """Whether an expression is the number of processes of the job."""
        if isinstance(node, ast.Call):
            if self.script.call_name(node) in {"int", "float"} and node.args:
                return self.is_world_size(node.args[0], depth)
            full = self.script.full_name(node)
            return (
                self.script.call_name(node) == "get_world_size"
                or full in {"horovod.torch.size", "instep.world_size"}
                or read_variable(self.script, node) in SIZE_VARIABLES
            )
        if isinstance(node, ast.Subscript):
            return read_variable(self.script, node) in SIZE_VARIABLES
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        if SIZE.match(self.script.dotted_name(node).split(".")[-1].lower()):
            return True
        return depth > 0 and any(
            self.is_world_size(b.value, depth - 1) for b in self.origins.bindings(node)
        )

    def has_world_size(self, node: ast.AST) -> bool:
        """Whether the number of processes is anywhere in an expression."""
        return any(map(self.is_world_size, ast.walk(node)))

    def depends_on_rank(self, node: ast.expr | None) -> bool:
        """Whether a value depends on the rank, as in `f"rank{rank}.csv"`."""
        if node is None:
            return False
        named = re.split(r"[\W_]+", self.origins.text(node).lower())
        if _PROCESS & set(named) or any(self.rank_type(inner) for inner in ast.walk(node)):
            return True
        made = [inner for origin in self.origins.of(node) for inner in ast.walk(origin)]
        return any(isinstance(name, ast.Name) and self._is_own_turn(name) for name in made)

    def _is_own_turn(self, name: ast.Name) -> bool:
        """The name of a loop over this rank's turns: `for i in range(rank, n, world_size)`."""
        return any(
            isinstance(loop, ast.For)
            and self.script.source(loop.target) == name.id
            and any(self.rank_type(inner) for inner in ast.walk(loop.iter))
            for loop in self.script.parent_loops(name)
        )


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


def _type_of_variable(name: str) -> RankType | None:
    if name in RANK_VARIABLES:
        return "rank"
    return "local rank" if name in LOCAL_RANK_VARIABLES else None


def _type_of_word(word: str) -> RankType | None:
    if LOCAL_RANK.search(word):
        return "local rank"
    return "rank" if GLOBAL_RANK.match(word) else None
