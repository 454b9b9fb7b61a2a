"""What the rules ask of a script: its models, samplers, loaders, collectives and loops."""

from __future__ import annotations

import ast
import re
from enum import StrEnum
from functools import cached_property

from instep.check.guards import RankGuards
from instep.check.origins import Origins
from instep.check.rank_expressions import (
    LOCAL_RANK_VARIABLES,
    RANK_VARIABLES,
    SIZE_VARIABLES,
    RankExpressions,
    read_variable,
)
from instep.check.script import Function, Script, keyword
from instep.check.spawned_processes import SpawnedProcesses

DDP = ("torch.nn.parallel.DDP", "apex.parallel.DDP", "torch.nn.parallel.DistributedDataParallel")
_IMPORTED = (*DDP, "torch.distributed", "torch.utils.data.DistributedSampler",
             "torch.utils.data.distributed.", "apex.parallel.Distributed")  # fmt: skip
_TORCH_ROOTS = ("torch", "horovod.torch", "instep", "accelerate", "deepspeed", "apex")
_LIBRARIES = ("horovod", "instep", "accelerate.Accelerator")
_CALLED = (*_LIBRARIES, "deepspeed.init", "torch.distributed.", *DDP)
"""Importing these libraries, or calling these functions of torch, marks a parallel script."""
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
"""What uses these starts the processes, and is one process itself."""
_DEVICE_COUNT = re.compile(r"\.(accelerator|cuda|xpu|npu|mlu|musa|hpu)\.device_count$")
LAUNCH_VARIABLES = RANK_VARIABLES | LOCAL_RANK_VARIABLES | SIZE_VARIABLES

_TORCH = {
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "barrier", "monitored_barrier",
    "all_to_all", "all_to_all_single", "broadcast_object_list", "all_gather_object",
    "gather_object", "scatter_object_list", "new_group",
}  # fmt: skip
_HOROVOD = {
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce",
    "allgather", "allgather_object", "broadcast", "broadcast_", "broadcast_parameters",
    "broadcast_optimizer_state", "broadcast_object", "barrier", "join", "alltoall",
    "reducescatter",
}  # fmt: skip
_INSTEP = {
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier", "all_gather_object", "broadcast_object", "gather_object",
    "gather_rows",
}  # fmt: skip
_WAITING_METHODS = {
    "instep.Mean": {"compute"},
    "instep.Accuracy": {"compute"},
    "instep.Checkpoint": {"step", "save", "resume", "epochs"},
}
"""Methods of instep's objects that every rank must call."""
_ACCELERATE = {"gather", "gather_for_metrics", "reduce", "wait_for_everyone"}
COLLECTIVES = (
    {f"torch.distributed.{name}" for name in _TORCH}
    | {f"horovod.torch.{name}" for name in _HOROVOD}
    | {f"instep.{name}" for name in _INSTEP}
)
_NORMALISED = re.compile(
    r"torchvision\.models\.(\w+\.)?(wide_)?(resne|densenet|mobilenet|efficientnet)"
)
REDUCING = re.compile(r"(all_?reduce|reduce_|^reduce$|gather|synchroni)")
_EVALUATION = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "testing"}
_TRAINING = {"train", "training", "tr"}


def split_words(text: str) -> set[str]:
    """The words in identifiers and strings: `testLoader_1` gives test, loader, 1."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)}


def is_evaluation_text(text: str) -> bool:
    """Whether a text mentions validation or test data, and not training data."""
    found = split_words(text)
    return bool(found & _EVALUATION) and not found & _TRAINING


class RuleScope(StrEnum):
    """The scripts to which a rule applies."""

    PROCESSES = "processes"
    """Scripts that are visibly written for several processes."""
    PARALLEL = "parallel"
    """The same, and scripts with nn.DataParallel."""
    ANY = "any"


class ScriptInfo:
    """One script and what the rules need to know of it, computed on first use."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.origins = Origins(script)
        self.ranks = RankExpressions(script, self.origins)
        self.guards = RankGuards(script, self.origins, self.ranks)
        self.processes = SpawnedProcesses(script)
        self._entered_collectives: dict[tuple[Function, int], ast.Call | None] = {}

    @cached_property
    def scopes(self) -> frozenset[RuleScope]:
        """The scopes of the rules that apply to this script."""
        if self.is_multi_process:
            return frozenset(RuleScope)
        if any(self.script.calls_of("torch.nn.DataParallel")):
            return frozenset({RuleScope.PARALLEL, RuleScope.ANY})
        return frozenset({RuleScope.ANY})

    @cached_property
    def is_multi_process(self) -> bool:
        """Whether the script is visibly written for several processes."""
        script = self.script
        if not any(n.startswith(_TORCH_ROOTS) for n in
                   script.imported_modules):  # fmt: skip
            return False
        if any(name.startswith(_LIBRARIES) for name in script.imported_modules):
            return True
        called = (script.full_name(call) for call in script.all(ast.Call))
        if any(name.startswith(_CALLED) and not name.startswith(_LAUNCHERS) for name in called):
            return True
        reads = [*script.all(ast.Subscript), *script.all(ast.Call)]
        if any(read_variable(script, node) in LAUNCH_VARIABLES for node in reads):
            return True
        imported = any(
            name.startswith(_IMPORTED) and not name.startswith(_LAUNCHERS)
            for name in script.imported_modules
        )
        return imported and not any(script.calls_of("torch.nn.DataParallel"))

    # --- models

    @cached_property
    def ddp_calls(self) -> list[ast.Call]:
        """The calls that wrap a model for one-process-per-device training."""
        return list(self.script.calls_of(*DDP))

    def ddp_call_of(self, node: ast.expr | None) -> ast.Call | None:
        """The DistributedDataParallel(...) call that a value may come from."""
        origins = self.origins.of(node)
        if any(isinstance(o, ast.Attribute) and o.attr == "module" for o in origins):
            return None  # `model.module if distributed else model`
        return next((o for o in origins if isinstance(o, ast.Call) and o in self.ddp_calls), None)

    @cached_property
    def has_batch_norm(self) -> bool:
        """Whether the script visibly builds a model with batch normalisation."""
        return any(
            "BatchNorm" in self.script.call_name(call)
            or _NORMALISED.match(self.script.full_name(call))
            for call in self.script.all(ast.Call)
        )

    # --- devices

    def is_device_count(self, node: ast.expr) -> bool:
        """Whether a value is torch.cuda.device_count(), or that of torch.npu, torch.accelerator and
        the like, wherever it comes from."""
        while isinstance(node, ast.Call) and self.script.call_name(node) in {"int", "max"}:
            node = node.args[0]
        origins = self.origins.of(node)
        return bool(origins) and all(
            _DEVICE_COUNT.search(self.script.full_name(origin)) for origin in origins
        )

    @cached_property
    def expects_several_nodes(self) -> bool:
        """Whether the script visibly expects more than one node."""
        reads = {text for text in self.script.strings if text.startswith(("SLURM_", "WORLD_S"))}
        return bool(reads) or any(
            word in name
            for name in self.origins.options
            for word in ("nnodes", "node_rank", "world_size", "num_nodes")
        )

    # --- data

    @cached_property
    def samplers(self) -> list[ast.Call]:
        """Calls of torch's DistributedSampler."""
        return list(self.script.calls_of("torch.utils.data.DistributedSampler"))

    @cached_property
    def loaders(self) -> list[ast.Call]:
        """Calls of torch's DataLoader."""
        return list(self.script.calls_of("torch.utils.data.DataLoader"))

    @cached_property
    def transforms(self) -> set[str]:
        """The classes of torchvision.transforms of which the script makes objects."""
        made = (self.script.full_name(call) for call in self.script.all(ast.Call))
        return {full.split(".")[-1] for full in made if full.startswith("torchvision.transforms")}

    def sampler_of(self, loader: ast.Call) -> ast.Call | None:
        """The DistributedSampler of a loader, if it may have one."""
        given = keyword(loader, "sampler", 3) or keyword(loader, "batch_sampler", 4)
        for call in self.origins.calls(given):
            if call in self.samplers:
                return call
            inner = call.args[0] if call.args else keyword(call, "sampler")
            for deeper in self.origins.calls(inner):
                if deeper in self.samplers:  # BatchSampler(DistributedSampler(...))
                    return deeper
        return None

    def loader_of(self, node: ast.expr | None) -> ast.Call | None:
        """The DataLoader call that a value may come from."""
        return next((c for c in self.origins.calls(node) if c in self.loaders), None)

    def has_shard_call(self, loader: ast.Call) -> bool:
        """`shard(DataLoader(…))`, `prepare(loader)`: somebody else divides it."""
        names = set(self.target_names(loader).split())
        return any(
            self.script.is_inside(loader, call)
            or names & {self.script.source(a) for a in call.args}
            for call in self.script.calls_named("shard", "prepare", "prepare_data_loader", "setup")
        )

    def target_names(self, call: ast.Call) -> str:
        """The names that a call's result is assigned to, as one text."""
        statement = self.script.statement_of(call)
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        return " ".join(self.script.source(target) for target in targets)

    def is_for_evaluation(self, call: ast.Call) -> bool:
        """Whether a sampler or loader is made for validation or test data, by its names."""
        dataset = keyword(call, "dataset", 0)
        own = f"{self.target_names(call)} {self.script.source(dataset) if dataset else ''}"
        found = split_words(own)
        if found & _EVALUATION or found & _TRAINING:
            return is_evaluation_text(own)
        function = self.script.function_of(call)
        if function is None or (self.is_of_tests and function.name.startswith("test_")):
            return False
        return is_evaluation_text(function.name)

    @cached_property
    def is_of_tests(self) -> bool:
        """Whether the script holds tests of code, whose `test_...` evaluate no model."""
        return not self.script.imported_roots.isdisjoint({"pytest", "unittest"})

    def loop_source(self, loop: ast.For | ast.comprehension) -> ast.expr | None:
        """What a loop runs over, without enumerate, tqdm and the like."""
        source: ast.expr = loop.iter
        while isinstance(source, ast.Call) and self.loader_of(source) is None and source.args:
            source = source.args[-1 if self.script.call_name(source) == "log_every" else 0]
        return source

    # --- collectives

    def is_collective(self, call: ast.Call) -> bool:
        """Whether every rank must make this call."""
        if self.script.full_name(call) in COLLECTIVES:
            return True
        function = call.func
        if not isinstance(function, ast.Attribute):
            return False
        if function.attr in _ACCELERATE and self.is_accelerator(function.value):
            return True
        if "instep" not in self.script.imported_roots:
            return False
        made = map(self.script.full_name, self.origins.calls(function.value))
        return any(function.attr in _WAITING_METHODS.get(name, ()) for name in made)

    def is_accelerator(self, node: ast.expr) -> bool:
        """Whether a value is an `accelerate.Accelerator`."""
        if "accelerate" not in self.script.imported_roots:
            return False
        return any(
            self.script.call_name(origin) == "Accelerator" for origin in self.origins.of(node)
        ) or self.script.dotted_name(node).endswith("accelerator")

    @cached_property
    def collectives(self) -> list[ast.Call]:
        """Every collective of the script, in the order of the text."""
        return [call for call in self.script.all(ast.Call) if self.is_collective(call)]

    def entered_collective(self, function: Function, depth: int = 3) -> ast.Call | None:
        """A collective that every call of this function enters, also indirectly."""
        if (function, depth) not in self._entered_collectives:
            self._entered_collectives[function, depth] = self._first_collective(function, depth)
        return self._entered_collectives[function, depth]

    def _first_collective(self, function: Function, depth: int) -> ast.Call | None:
        for call in self.script.calls_in(function):
            collective = self.is_collective(call)
            inner = [f for f in self.called_functions(call) if f is not function and depth]
            if not collective and not inner:
                continue
            if self._is_conditional(call, function) or self.guards.local_guards(call):
                continue
            if collective:
                return call
            for function_called in inner:
                if found := self.entered_collective(function_called, depth - 1):
                    return found
        return None

    def _is_conditional(self, call: ast.Call, function: Function) -> bool:
        """Whether it is under an `if` that asks more than whether there are several processes."""
        for above in self.script.ancestors(call):
            if above is function:
                return False
            if isinstance(above, ast.If | ast.IfExp):
                test = self.script.source(above.test)
                if not re.search(r"world_size|is_initialized|is_available|distributed\b", test):
                    return True
                if self.script.dotted_name(above.test) in {a.arg for a in function.args.args}:
                    return True  # a flag that the caller sets
            if isinstance(above, ast.Lambda | ast.ExceptHandler):
                return True
        return False

    def called_functions(self, call: ast.Call) -> list[Function]:
        """The functions of this script that a plain call `f(...)` calls."""
        if isinstance(call.func, ast.Name):
            return self.script.functions.get(call.func.id, [])
        return []

    @cached_property
    def reduction_calls(self) -> list[ast.Call]:
        """Calls that combine values of all ranks, by their name."""
        return [c for c in self.script.all(ast.Call) if REDUCING.search(self.script.call_name(c))]

    # --- training

    @cached_property
    def backward_calls(self) -> list[ast.Call]:
        """Calls of `.backward()`, `accelerator.backward(loss)` and the like."""
        return list(self.script.calls_named("backward"))

    @cached_property
    def training_loops(self) -> list[ast.For | ast.While]:
        """The innermost loops around each backward: one turn is one step."""
        found: list[ast.For | ast.While] = []
        for call in self.backward_calls:
            loop = next(self.script.parent_loops(call), None)
            if loop is not None and loop not in found:
                found.append(loop)
        return found
