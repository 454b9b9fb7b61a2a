"""INS601, INS602, INS605: files and output of several ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.guards import Guard
from instep.check.script import Function, constant, keyword
from instep.check.script_info import ScriptInfo, split_words

WRITERS = {
    "torch.save": 1,
    "pickle.dump": 1,
    "json.dump": 1,
    "numpy.save": 0,
    "numpy.savez": 0,
    "numpy.savetxt": 0,
    "shutil.copyfile": 1,
    "shutil.copy": 1,
    "open": 0,
    "torch.utils.tensorboard.SummaryWriter": 0,
    "tensorboardX.SummaryWriter": 0,
    "wandb.init": 0,
}
"""Calls that write, and the position of the path."""
CURVES = {"SummaryWriter", "init"}
"""Writers that give each process a file of its own."""
WRITING_METHODS = {"to_csv": 0, "save_pretrained": 0, "savefig": 0}


def _writes(info: ScriptInfo) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """Calls that write a file, with their path."""
    for call in info.script.all(ast.Call):
        word = info.script.call_name(call)
        full = info.script.full_name(call) or (word if isinstance(call.func, ast.Name) else "")
        place = WRITERS.get(full)
        if place is None and isinstance(call.func, ast.Attribute):
            place = WRITING_METHODS.get(word)
        if place is None or _saves_by_itself(info, call):
            continue
        if word == "open":
            mode = constant(keyword(call, "mode", 1))
            if not isinstance(mode, str) or not set(mode) & set("wa"):
                continue
        path = call.args[place] if len(call.args) > place else None
        if not any(
            info.script.call_name(o) in {"BytesIO", "StringIO"} for o in info.origins.of(path)
        ):
            yield call, path


def _saves_by_itself(info: ScriptInfo, call: ast.Call) -> bool:
    """`save_pretrained` that is told who is the main process, or has a model in shards."""
    if keyword(call, "is_main_process") is not None:
        return True
    origins = info.origins.of(info.script.owner(call))
    made = set(map(info.script.call_name, origins))
    return bool(made & {"prepare", "initialize", "fully_shard", "FullyShardedDataParallel"})


@rule("INS601", Severity.ERROR, "Every process writes the same file.")
def _write_on_every_rank(info: ScriptInfo) -> Iterator[Hit]:
    """N processes open the same path and write at the same time. From N = 2 on a checkpoint
    may be a mixture that cannot be read, and a CSV has each line N times. Let one rank
    write, or give every rank a file of its own.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    for epoch in range(9):
        torch.save(net.state_dict(), "checkpoint.pt")
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    for epoch in range(9):
        if dist.get_rank() == 0:
            torch.save(net.state_dict(), "checkpoint.pt")
    ```
    """
    if info.script.imported_roots & {"pytorch_lightning", "lightning", "ignite"}:
        return  # they choose the process that writes by themselves
    seen: set[tuple[Function | None, str]] = set()
    for call, path in _writes(info):
        function = info.script.function_of(call)
        if not info.processes.runs_on_ranks(call) or info.guards.effective_guard(call):
            continue
        if _is_excluded(info, call):
            continue
        if info.ranks.depends_on_rank(path) or not _is_called_here(info, call):
            continue
        text = info.script.source(call)
        if (function, text) in seen or _is_reported_elsewhere(info, call):
            continue
        seen.add((function, text))
        where = f" on {info.script.source(path)}" if path is not None else ""
        yield Hit(
            call,
            f"every process runs {info.script.source(call.func)}{where}",
            "from N = 2 on, every curve appears N times"
            if info.script.call_name(call) in CURVES
            else "from N = 2 on, the processes write over each other",
            f"if {info.ranks.on_rank_0}:\n    {text}",
        )


def _is_excluded(info: ScriptInfo, call: ast.Call) -> bool:
    """Under `if option:` where the script asserts `not option` for several processes."""
    denied = {
        info.script.source(claim.test.operand)
        for claim in info.script.all(ast.Assert)
        if isinstance(claim.test, ast.UnaryOp) and isinstance(claim.test.op, ast.Not)
    }
    return any(
        isinstance(above, ast.If) and info.script.source(above.test).removeprefix("not ") in denied
        for above in info.script.ancestors(call)
    )


def _is_called_here(info: ScriptInfo, call: ast.Call, depth: int = 4) -> bool:
    """Whether this script itself comes to the call, from its own top or a spawned function."""
    function = info.script.function_of(call)
    if function is None:
        return True
    if depth == 0:
        return False
    if info.processes.main is function:
        return True
    if any(isinstance(above, ast.ClassDef) for above in info.script.ancestors(function)):
        return False
    calls = [c for c in info.origins.calls_of(function) if isinstance(c.func, ast.Name)]
    return any(
        _is_called_here(info, c, depth - 1) and not info.guards.effective_guard(c) for c in calls
    )


def _is_reported_elsewhere(info: ScriptInfo, call: ast.Call) -> bool:
    """`pickle.dump(x, open(path, "wb"))`: one finding, that of `open`."""
    return info.script.call_name(call) == "dump" or (
        info.script.call_name(call) == "copyfile" and any(info.script.calls_of("torch.save"))
    )


@rule(
    "INS602",
    Severity.WARNING,
    "A test of the local rank guards a write: every node writes the same file.",
)
def _write_on_every_node(info: ScriptInfo) -> Iterator[Hit]:
    """`local_rank == 0` holds once on every node. On a shared file system, two nodes (N = 16
    with 8 devices each) write the same checkpoint at the same time.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    if args.local_rank == 0:
        torch.save(net.state_dict(), "checkpoint.pt")
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "checkpoint.pt")
    ```
    """
    if info.processes.spawn is not None:
        return
    seen: set[ast.AST] = set()
    for call, path in _writes(info):
        guard = info.guards.effective_guard(call)
        if guard is None or guard.rank_type != "local rank" or not guard.on_rank_0:
            continue
        if any(g.rank_type == "rank" for g in info.guards.local_guards(call)) or _about_nodes(
            info, guard
        ):
            continue
        if info.script.call_name(call) in CURVES or info.ranks.depends_on_rank(path):
            continue
        if guard.test not in seen:
            seen.add(guard.test)
            yield Hit(
                call,
                f"{guard.condition} holds on one process of every node",
                "from the second node on, the nodes write over each other",
                f"if {info.ranks.on_rank_0}:",
            )


def _about_nodes(info: ScriptInfo, guard: Guard) -> bool:
    """The same test asks for the node as well, as in `node_rank == 0 and local_rank == 0`."""
    whole = info.script.parent(guard.test)
    return isinstance(whole, ast.BoolOp) and "node" in info.script.source(whole)


@rule("INS605", Severity.WARNING, "Every process prints in the training loop.")
def _print_on_every_rank(info: ScriptInfo) -> Iterator[Hit]:
    """Each line appears N times, with N different losses, in any order.

    ## Bad
    ```python
    import torch.distributed as dist

    for x in loader:
        loss = model(x)
        loss.backward()
        print(loss)
    ```

    ## Good
    ```python
    import torch.distributed as dist

    for x in loader:
        loss = model(x)
        loss.backward()
        if dist.get_rank() == 0:
            print(loss)
    ```
    """
    if "print" in info.script.functions or any(
        info.script.dotted_name(t).endswith("print")
        for a in info.script.all(ast.Assign)
        for t in a.targets
    ):
        return
    names = {name.split(".")[-1] for name in info.script.imported_modules}
    if names & {"setup_for_distributed", "init_distributed_mode", "print"} or any(
        split_words(name) & {"misc", "util", "utils"} for name in names
    ):
        return  # print may be silenced in a file that is not read here
    for call in info.script.all(ast.Call):
        loops = [loop for loop in info.script.parent_loops(call) if loop in info.training_loops]
        if not loops or "torch.distributed.rpc" in info.script.imported_modules:
            continue
        if info.guards.effective_guard(call) or not _prints(info, call):
            continue
        if any(info.ranks.depends_on_rank(argument) for argument in call.args):
            continue
        if info.processes.runs_on_ranks(call):
            text = info.script.source(call)
            yield Hit(
                call,
                f"every process runs {info.script.source(call.func)} in the training loop",
                "with N processes each line appears N times, with different numbers",
                f"if {info.ranks.on_rank_0}:\n    {text}",
            )
            return


def _prints(info: ScriptInfo, call: ast.Call) -> bool:
    """print itself, or a function or method of this script that prints without a guard."""
    word = info.script.call_name(call)
    if isinstance(call.func, ast.Name) and word == "print":
        return True
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Name)
        and inner.func.id == "print"
        and not info.guards.local_guards(inner)
        for function in info.script.functions.get(word, [])
        for inner in ast.walk(function)
    )
