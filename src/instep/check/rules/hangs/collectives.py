"""INS101 to INS103: a collective is called by some ranks only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.guards import Guard
from instep.check.script import constant, keyword
from instep.check.script_info import ScriptInfo

SHARDING = {"FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "MegatronLMPlugin"}
"""With one of these `accelerator.save_state` needs every rank; with plain DDP it does not."""
_GATHERING_STATES = {
    f"torch.distributed.checkpoint.state_dict.get_{name}"
    for name in ("state_dict", "model_state_dict", "optimizer_state_dict")
}
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
