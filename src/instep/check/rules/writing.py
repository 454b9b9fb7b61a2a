"""INS601, INS602, INS605: what is written and printed, and by whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.facts import Facts, words
from instep.check.finding import Hit, Severity, rule
from instep.check.guards import Guard
from instep.check.script import Function, constant, keyword

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


def _writes(facts: Facts) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """Calls that write a file, with their path."""
    for call in facts.script.all(ast.Call):
        word = facts.script.called(call)
        full = facts.script.full_name(call) or (word if isinstance(call.func, ast.Name) else "")
        place = WRITERS.get(full)
        if place is None and isinstance(call.func, ast.Attribute):
            place = WRITING_METHODS.get(word)
        if place is None or _saves_by_itself(facts, call):
            continue
        if word == "open":
            mode = constant(keyword(call, "mode", 1))
            if not isinstance(mode, str) or not set(mode) & set("wa"):
                continue
        path = call.args[place] if len(call.args) > place else None
        if not any(
            facts.script.called(o) in {"BytesIO", "StringIO"} for o in facts.origins.of(path)
        ):
            yield call, path


def _saves_by_itself(facts: Facts, call: ast.Call) -> bool:
    """`save_pretrained` that is told who is the main process, or has a model in shards."""
    if keyword(call, "is_main_process") is not None:
        return True
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    made = {facts.script.called(origin) for origin in facts.origins.of(owner)}
    return bool(made & {"prepare", "initialize", "fully_shard", "FullyShardedDataParallel"})


@rule(
    "INS601",
    "write-on-every-rank",
    Severity.ERROR,
    "Every process writes the same file.",
)
def write_on_every_rank(facts: Facts) -> Iterator[Hit]:
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
    if _main_process_hidden(facts):
        return
    seen: set[tuple[Function | None, str]] = set()
    for call, path in _writes(facts):
        function = facts.script.function_of(call)
        if not facts.processes.run(call) or facts.guards.around(call):
            continue
        if _excluded(facts, call):
            continue
        if facts.ranks.mentions_rank(path) or not _called_here(facts, call):
            continue
        text = facts.script.source(call)
        if (function, text) in seen or _wraps_another(facts, call):
            continue
        seen.add((function, text))
        where = facts.script.source(path) if path is not None else "its file"
        yield Hit(
            call,
            f"every process runs {facts.script.source(call.func)} on {where}",
            "from N = 2 on, every curve appears N times"
            if facts.script.called(call) in CURVES
            else "from N = 2 on, the processes write over each other",
            f"if {facts.ranks.on_rank_0}:\n    {text}",
        )


def _main_process_hidden(facts: Facts) -> bool:
    """Lightning and Ignite choose the process that writes by themselves."""
    roots = {name.split(".")[0] for name in facts.script.imported_modules}
    return bool(roots & {"pytorch_lightning", "lightning", "ignite"})


def _excluded(facts: Facts, call: ast.Call) -> bool:
    """Under `if option:` where the script asserts `not option` for several processes."""
    denied = {
        facts.script.source(claim.test.operand)
        for claim in facts.script.all(ast.Assert)
        if isinstance(claim.test, ast.UnaryOp) and isinstance(claim.test.op, ast.Not)
    }
    return any(
        isinstance(above, ast.If) and facts.script.source(above.test).removeprefix("not ") in denied
        for above in facts.script.ancestors(call)
    )


def _called_here(facts: Facts, call: ast.Call, depth: int = 4) -> bool:
    """Whether this script itself comes to the call, from its own top or a spawned function."""
    function = facts.script.function_of(call)
    if function is None:
        return True
    if depth == 0:
        return False
    if facts.processes.main is function:
        return True
    if any(isinstance(above, ast.ClassDef) for above in facts.script.ancestors(function)):
        return False
    calls = [c for c in facts.origins.calls_of(function) if isinstance(c.func, ast.Name)]
    return any(_called_here(facts, c, depth - 1) and not facts.guards.around(c) for c in calls)


def _wraps_another(facts: Facts, call: ast.Call) -> bool:
    """`pickle.dump(x, open(path, "wb"))`: one finding, that of `open`."""
    return facts.script.called(call) == "dump" or (
        facts.script.called(call) == "copyfile" and any(facts.script.calls_of("torch.save"))
    )


@rule(
    "INS602",
    "write-on-every-node",
    Severity.WARNING,
    "The local rank decides who writes: every node writes the same file.",
)
def write_on_every_node(facts: Facts) -> Iterator[Hit]:
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
    if facts.processes.spawn is not None:
        return
    seen: set[ast.AST] = set()
    for call, path in _writes(facts):
        guard = facts.guards.around(call)
        if guard is None or guard.kind != "local rank" or not guard.zero:
            continue
        if any(g.kind == "rank" for g in facts.guards.of(call)) or _about_nodes(facts, guard):
            continue
        if facts.script.called(call) in CURVES or facts.ranks.mentions_rank(path):
            continue
        if guard.test not in seen:
            seen.add(guard.test)
            yield Hit(
                call,
                f"{guard.where} holds on one process of every node",
                "from the second node on, the nodes write over each other",
                f"if {facts.ranks.on_rank_0}:",
            )


def _about_nodes(facts: Facts, guard: Guard) -> bool:
    """The same test asks for the node as well, as in `node_rank == 0 and local_rank == 0`."""
    whole = facts.script.parent(guard.test)
    return isinstance(whole, ast.BoolOp) and "node" in facts.script.source(whole)


@rule(
    "INS605",
    "print-on-every-rank",
    Severity.WARNING,
    "Every process prints in the training loop.",
)
def print_on_every_rank(facts: Facts) -> Iterator[Hit]:
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
    if "print" in facts.script.functions or any(
        facts.script.dotted(t).endswith("print")
        for a in facts.script.all(ast.Assign)
        for t in a.targets
    ):
        return
    names = {name.split(".")[-1] for name in facts.script.imported_modules}
    if names & {"setup_for_distributed", "init_distributed_mode", "print"} or any(
        words(name) & {"misc", "util", "utils"} for name in names
    ):
        return  # print may be silenced in a file that is not read here
    for call in facts.script.all(ast.Call):
        loops = [loop for loop in facts.script.loops_around(call) if loop in facts.training_loops]
        if not loops or "torch.distributed.rpc" in facts.script.imported_modules:
            continue
        if facts.guards.around(call) or not _prints(facts, call):
            continue
        if any(facts.ranks.mentions_rank(argument) for argument in call.args):
            continue
        if facts.processes.run(call):
            text = facts.script.source(call)
            yield Hit(
                call,
                f"every process runs {facts.script.source(call.func)} in the training loop",
                "with N processes each line appears N times, with different numbers",
                f"if {facts.ranks.on_rank_0}:\n    {text}",
            )
            return


def _prints(facts: Facts, call: ast.Call) -> bool:
    """print itself, or a function or method of this script that prints without a guard."""
    word = facts.script.called(call)
    if isinstance(call.func, ast.Name) and word == "print":
        return True
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Name)
        and inner.func.id == "print"
        and not facts.guards.of(inner)
        for function in facts.script.functions.get(word, [])
        for inner in ast.walk(function)
    )
