"""INS101 to INS103, INS106: ranks that wait for each other for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.guards import Guard
from instep.check.rules import counting, two_lines
from instep.check.script import constant, keyword
from instep.check.script_info import ScriptInfo

SHARDING = {"FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "MegatronLMPlugin"}
"""With one of these `accelerator.save_state` needs every rank; with plain DDP it does not."""
_GATHERING_STATES = {
    f"torch.distributed.checkpoint.state_dict.get_{name}"
    for name in ("state_dict", "model_state_dict", "optimizer_state_dict")
}
_MEAN_OF_LOSS = 'instep.all_reduce(loss.detach(), "mean")'
WAITING_SAVES = {
    "save_state", "save_checkpoint", "consolidate_state_dict", "full_optim_state_dict",
    "state_dict",
}  # fmt: skip


@rule("INS101", Severity.ERROR, "A collective is called by some ranks only.")
def _collective_on_some_ranks(info: ScriptInfo) -> Iterator[Hit]:
    """A collective (all-reduce, broadcast, gather, barrier) ends when *every* rank has
    called it. Under `if rank == 0` the other ranks never do. With N = 1 nothing is wrong;
    from N = 2 on, rank 0 waits until the time-out, or is answered by the *next* collective
    of the others, and both go on with wrong numbers.

    ## Bad
    ```python
    import torch.distributed as dist

    def report(loss, rank):
        if rank == 0:
            dist.all_reduce(loss)
            print(loss)
    ```

    ## Good
    ```python
    import torch.distributed as dist

    def report(loss, rank):
        dist.all_reduce(loss)
        if rank == 0:
            print(loss)
    ```
    """
    if any(info.script.calls_of("horovod.torch.join")):
        return  # ranks that have joined answer every collective with zeros
    for call in info.script.all(ast.Call):
        if not info.is_collective(call) and not info.called_functions(call):
            continue
        guards = info.guards.local_guards(call)
        inner = _find_collective(info, call) if guards else None
        if inner is None or _has_counterpart(info, call, guards[0]):
            continue
        if guards[0].is_scope and not info.script.full_name(inner).startswith("torch."):
            continue
        if keyword(inner, "group") is not None or keyword(inner, "process_set") is not None:
            continue
        name = info.script.source(call.func)
        through = "" if inner is call else f" (it calls {info.script.source(inner.func)})"
        yield Hit(
            call,
            f"{name}{through} is reached only where {guards[0].condition}",
            "from N = 2 on, the ranks that do not come here leave the others waiting",
            f"{info.script.source(call)}  # on every rank, before or after the `if`",
        )


def _find_collective(info: ScriptInfo, call: ast.Call) -> ast.Call | None:
    if info.is_collective(call):
        return call
    return next((t for f in info.called_functions(call) if (t := info.entered_collective(f))), None)


def _has_counterpart(info: ScriptInfo, call: ast.Call, guard: Guard) -> bool:
    """The other ranks make the same call in the same function: `rank 0 goes first`."""
    mine = guard.on_rank_0, guard.rank_type
    for other in info.script.calls_named(info.script.call_name(call)):
        if other is not call and info.script.are_in_one_function(other, call):
            guards = info.guards.local_guards(other)
            is_of_others = any((g.on_rank_0, g.rank_type) != mine for g in guards)
            if is_of_others or info.script.are_exclusive(call, other):
                return True
    return False


@rule("INS102", Severity.ERROR, "A model that waits for all ranks is called by some ranks only.")
def _model_call_on_some_ranks(info: ScriptInfo) -> Iterator[Hit]:
    """A model in DistributedDataParallel communicates: its forward broadcasts the buffers of
    BatchNorm, its backward reduces gradients. Called on rank 0 only, it waits for the others
    from N = 2 on. The module inside, `model.module`, does not communicate. A model in
    `instep.replicate` that has batch normalisation waits too, unless it is in `eval()`: in training
    its statistics are those of all ranks' rows.

    ## Bad
    ```python
    from torch.nn.parallel import DistributedDataParallel

    def train(net, loader, rank):
        model = DistributedDataParallel(net)
        for x in loader:
            model(x).sum().backward()
            if rank == 0:
                print(model(x).mean())
    ```

    ## Good
    ```python
    from torch.nn.parallel import DistributedDataParallel

    def train(net, loader, rank):
        model = DistributedDataParallel(net)
        for x in loader:
            model(x).sum().backward()
            if rank == 0:
                print(model.module(x).mean())
    ```
    """
    for call in info.script.all(ast.Call):
        if not isinstance(call.func, ast.Name | ast.Attribute) or not info.ddp_calls:
            continue
        wrap = info.ddp_call_of(call.func)
        guard = info.guards.effective_guard(call, depth=1) if wrap else None
        if wrap is None or guard is None or _is_harmless_in_evaluation(info, call, wrap):
            continue
        name = info.script.source(call.func)
        yield Hit(
            call,
            f"{name} is a DistributedDataParallel model and is called only where {guard.condition}",
            "from N = 2 on, it waits for the other ranks: its forward and backward communicate",
            info.script.source(call).replace(f"{name}(", f"{name}.module(", 1),
        )
    for call in info.script.all(ast.Call) if info.has_batch_norm else ():
        guard = info.guards.effective_guard(call, depth=1) if _is_replica(info, call) else None
        function = info.script.function_of(call)
        calls = {info.script.call_name(c) for c in info.script.calls_in(function)}
        if guard is not None and not guard.is_scope and "eval" not in calls:
            name = info.script.source(call.func)
            yield Hit(
                call,
                f"{name} has batch normalisation and is called only where {guard.condition}",
                "from N = 2 on, it waits for the other ranks: its statistics are of all rows",
                f"{name}.eval()  # before it; or call it on every rank",
            )


def _is_replica(info: ScriptInfo, call: ast.Call) -> bool:
    """Whether this calls what instep.replicate has been given."""
    if not isinstance(call.func, ast.Name | ast.Attribute) or info.ddp_call_of(call.func):
        return False
    name = info.script.source(call.func)
    made = info.script.calls_of("instep.replicate")
    return any(
        made_by in info.origins.calls(call.func)
        or (bool(made_by.args) and info.script.source(made_by.args[0]) == name)
        for made_by in made
    )


def _is_harmless_in_evaluation(info: ScriptInfo, call: ast.Call, wrap: ast.Call) -> bool:
    """Without gradients, or in eval(), only a model with buffers talks."""
    if constant(keyword(wrap, "broadcast_buffers")) is False:
        return True
    function = info.script.function_of(call)
    called = {info.script.call_name(c) for c in info.script.calls_in(function)}
    decorators = [info.script.source(d) for d in getattr(function, "decorator_list", [])]
    if called & {"no_grad", "inference_mode"} or any("no_grad" in d for d in decorators):
        return True  # its one broadcast is answered by the others' next forward
    return "eval" in called and not info.has_batch_norm


@rule("INS103", Severity.ERROR, "A save that all ranks must enter is called by some ranks only.")
def _waiting_save_on_some_ranks(info: ScriptInfo) -> Iterator[Hit]:
    """Some ways to save collect pieces from every rank, or wait for every rank at the end:
    DeepSpeed's `engine.save_checkpoint`, `optimizer.consolidate_state_dict`,
    `torch.distributed.checkpoint.save`, and `accelerator.save_state` with FSDP, DeepSpeed or
    automatic names. They choose the writing rank by themselves. Under `if rank == 0` they
    hang from N = 2 on. So do the `state_dict()` of a model in FullyShardedDataParallel and the
    functions of `torch.distributed.checkpoint.state_dict`, which gather the parameters: they
    are called on every rank, and one rank saves what they return.

    ## Bad
    ```python
    import deepspeed
    import torch.distributed as dist

    engine, optimizer, _, _ = deepspeed.initialize(model=net, config="config.json")
    if dist.get_rank() == 0:
        engine.save_checkpoint("checkpoint")
    ```

    ## Good
    ```python
    import deepspeed
    import torch.distributed as dist

    engine, optimizer, _, _ = deepspeed.initialize(model=net, config="config.json")
    engine.save_checkpoint("checkpoint")
    ```
    """
    for call in info.script.all(ast.Call):
        if not _needs_every_rank(info, call):
            continue
        guard = info.guards.effective_guard(call, depth=1)
        if guard is not None:
            is_state = info.script.call_name(call).endswith("state_dict")
            rest = ", before one rank saves it" if is_state else "; it chooses who writes"
            yield Hit(
                call,
                f"{info.script.source(call.func)} waits for every rank, but is called only "
                f"where {guard.condition}",
                "from N = 2 on, it never returns",
                f"{info.script.source(call)}  # on every rank{rest}",
            )


def _needs_every_rank(info: ScriptInfo, call: ast.Call) -> bool:
    full, word = info.script.full_name(call), info.script.call_name(call)
    if full in {"torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"}:
        return True
    if full in _GATHERING_STATES:
        return any(n.startswith("torch.distributed.fsdp") for n in info.script.imported_modules)
    if word not in WAITING_SAVES or not isinstance(call.func, ast.Attribute):
        return False
    if word == "state_dict":
        return any(_shards_parameters(info, c) for c in info.origins.calls(call.func.value))
    if word == "save_checkpoint":
        engine = info.origins.calls(call.func.value)
        return any(info.script.full_name(c) == "deepspeed.initialize" for c in engine)
    if word == "save_state":
        is_sharded = any(info.script.calls_named(*SHARDING))
        is_named = any(k.arg == "automatic_checkpoint_naming" for k in info.script.all(ast.keyword))
        return info.is_accelerator(call.func.value) and (is_sharded or is_named)
    return True


def _shards_parameters(info: ScriptInfo, wrap: ast.Call) -> bool:
    full = info.script.full_name(wrap)
    return full.startswith("torch.distributed.fsdp") and full.endswith("FullyShardedDataParallel")


@rule("INS106", Severity.ERROR, "One rank's rows decide which steps it takes.")
def _steps_by_own_rows(info: ScriptInfo) -> Iterator[Hit]:
    """`instep.shard(loader)` hands each rank other rows, and so does a DistributedSampler. A loss,
    or the number of rows, is then another on each. Where it decides whether a step is left out or
    the training ends, some ranks go on without the others: from N = 2 on, DistributedDataParallel
    waits for ever, and instep ends with an error that names the line. So it is with early stopping
    by the loss of a validation that is divided among the ranks. Decide by a number that is equal on
    all ranks.

    ## Bad
    ```python
    import instep
    from torch.utils.data import DataLoader

    for x, y in instep.shard(DataLoader(train_set, batch_size=64)):
        loss = loss_function(model(x), y)
        if loss.item() > 10:
            continue
        loss.backward()
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader

    for x, y in instep.shard(DataLoader(train_set, batch_size=64)):
        loss = loss_function(model(x), y)
        if instep.all_reduce(loss.detach(), "mean") > 10:
            continue
        loss.backward()
    ```
    """
    for branch in info.script.all(ast.If):
        leaving = [each for each in branch.body if isinstance(each, ast.Break | ast.Continue)]
        outer = [*info.script.parent_loops(branch)]
        if not leaving or not outer or counting.is_reduced_nearby(info, branch):
            continue
        if not _trains(info, outer[0]) or not _is_decided_by_rows(info, branch):
            continue
        is_end = not any(
            isinstance(loop, ast.For) and two_lines.has_own_rows(info, loop) for loop in outer
        )
        mean = (
            "mean = instep.Mean()\n"
            "mean.update(loss.detach(), len(x))  # in the loop\n"
            "mean.compute()  # decide by this: all ranks have it"
        )
        if info.ddp_calls or not is_end:
            call = "dist.all_reduce(value)" if info.ddp_calls else _MEAN_OF_LOSS
            mean = f"{call}  # decide by this: all ranks have it"
        yield Hit(
            branch,
            f"{info.script.source(branch.test)} is decided by this rank's rows",
            "from N = 2 on, some ranks end the training, and the others go on without them"
            if is_end
            else "from N = 2 on, ranks leave out other steps than the others, or than one process",
            mean,
        )


def _trains(info: ScriptInfo, loop: ast.AST) -> bool:
    """Whether a loop makes steps, itself or by a function of the script that it calls."""
    calls = [*info.script.calls_inside(loop)]
    calls += [
        inner
        for call in calls
        for function in info.called_functions(call)
        for inner in info.script.calls_in(function)
    ]
    return any(call in info.backward_calls for call in calls)


def _is_decided_by_rows(info: ScriptInfo, branch: ast.If) -> bool:
    """Whether a test depends on the rows that a loop gives this rank, around the test or before."""
    if info.script.call_name(branch.test) == "isinstance":
        return False
    around = [*info.script.parent_loops(branch)]
    for loop in around:
        if isinstance(loop, ast.For) and two_lines.has_own_rows(info, loop):
            return two_lines.depends_on_rows(info, loop, branch.test, two_lines.DEPTH)
    return (
        _is_made_of_rows(info, branch.test, two_lines.DEPTH)
        or _is_counted_by_rows(info, branch, around[0])
        or _asks_who_knows_rows(info, branch, around[0])
    )


def _is_made_of_rows(info: ScriptInfo, value: ast.AST, depth: int) -> bool:
    """Whether a value is made of what a loop over this rank's rows has added up, here or in a
    function of the script, and is not reduced there."""
    if depth == 0 or counting.is_reduced_nearby(info, value):
        return False
    for inner in ast.walk(value):
        if isinstance(inner, ast.Call):
            made = [
                each.value
                for function in info.called_functions(inner)
                for each in ast.walk(function)
                if isinstance(each, ast.Return) and each.value is not None
            ]
        elif isinstance(inner, ast.Name):
            if _adds_up_rows(info, inner):
                return True
            made = [bound.value for bound in info.origins.bindings(inner)]
        else:
            continue
        if any(_is_made_of_rows(info, each, depth - 1) for each in made):
            return True
    return False


def _adds_up_rows(info: ScriptInfo, name: ast.Name) -> bool:
    """Whether `name += …` adds up, in the same function, what depends on this rank's rows."""
    return any(
        isinstance(loop, ast.For)
        and two_lines.has_own_rows(info, loop)
        and two_lines.depends_on_rows(info, loop, changed.value, two_lines.DEPTH)
        for changed in info.script.all(ast.AugAssign)
        if info.script.dotted_name(changed.target) == name.id
        and info.script.are_in_one_function(changed, name)
        for loop in info.script.parent_loops(changed)
    )


def _is_counted_by_rows(info: ScriptInfo, branch: ast.If, loop: ast.AST) -> bool:
    """Whether a test asks for a number that another such test in the loop counts up, as early
    stopping counts the epochs since the best one."""
    asked = {info.script.dotted_name(each) for each in ast.walk(branch.test)} - {""}
    return any(
        _is_made_of_rows(info, above.test, two_lines.DEPTH)
        for changed in info.script.all(ast.AugAssign)
        if info.script.dotted_name(changed.target) in asked and info.script.is_inside(changed, loop)
        for above in info.script.ancestors(changed)
        if isinstance(above, ast.If) and info.script.is_inside(above, loop)
    )


def _asks_who_knows_rows(info: ScriptInfo, branch: ast.If, loop: ast.AST) -> bool:
    """Whether a test asks an object that the loop has told such a value: `stopper(loss)`, and then
    `if stopper.early_stop`."""
    asked = {
        info.script.dotted_name(each.value)
        for each in ast.walk(branch.test)
        if isinstance(each, ast.Attribute)
    } - {""}
    return any(
        info.script.dotted_name(call.func).partition(".")[0] in asked
        and any(_is_made_of_rows(info, given, two_lines.DEPTH) for given in call.args)
        for call in info.script.calls_inside(loop)
    )
