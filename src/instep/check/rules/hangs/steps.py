"""INS104, INS105, INS109: slow or confused steps, and steps of some ranks only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo


@rule("INS104", Severity.WARNING, "Several Horovod tensors are sent under one name.")
def _one_name_in_flight(info: ScriptInfo) -> Iterator[Hit]:
    """Horovod matches the tensors of different ranks by `name`. Two in flight under one
    name are an error ("duplicate tensor name"); one after the other they work, but the
    stall report can then not tell which of them a rank is waiting for, and the response
    cache is useless when their shapes differ. It concerns every N.

    ## Bad
    ```python
    import horovod.torch as hvd

    def mean(value):
        return hvd.allreduce(value, name="metric")

    loss, accuracy = mean(loss), mean(accuracy)
    ```

    ## Good
    ```python
    import horovod.torch as hvd

    def mean(value, name):
        return hvd.allreduce(value, name=name)

    loss, accuracy = mean(loss, "loss"), mean(accuracy, "accuracy")
    ```
    """
    seen: dict[str, ast.Call] = {}
    for call in info.script.all(ast.Call):
        full = info.script.full_name(call)
        if not full.startswith("horovod.torch.") or full.split(".")[-1] not in {
            "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "allgather",
            "allgather_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
        }:  # fmt: skip
            continue
        name = constant(keyword(call, "name"))
        if not isinstance(name, str):
            continue
        tensors = _passed_tensors(info, call)
        looped = "async" in full and any(info.script.parent_loops(call))
        if name in seen or len(tensors) > 1 or looped:
            yield Hit(
                call,
                f"several tensors are sent under the one name {name!r}",
                "at any N: an error when two are in flight, else a stall report without meaning",
                info.script.source(call).replace(repr(name), "name"),
            )
        seen[name] = call


def _passed_tensors(info: ScriptInfo, call: ast.Call) -> set[str]:
    """What the callers of this function pass for the tensor that is sent."""
    function = info.script.function_of(call)
    if function is None or not call.args:
        return set()
    parameters = [a.arg for a in function.args.args if a.arg != "self"]
    sent = re.findall(r"\w+", info.origins.text(call.args[0]))
    if not parameters or parameters[0] not in sent:
        return set()
    return {info.script.source(c.args[0]) for c in info.origins.calls_of(function) if c.args}


@rule(
    "INS105", Severity.WARNING, "Each step blocks between forward and backward.", RuleScope.PARALLEL
)
def _wait_before_backward(info: ScriptInfo) -> Iterator[Hit]:
    """`.item()` and `barrier()` stop the program until the device (or the slowest rank) has
    caught up. Between forward and backward of each step this empties the queue of work
    just before the longest part of the step, at any N, and at large N every rank waits
    for the slowest one. It is not needed: gradients are reduced in backward anyway. Call it
    after `optimizer.step()`, and only when something is printed.

    ## Bad
    ```python
    import torch.distributed as dist

    def train(model, loader, optimizer, total):
        for x, y in loader:
            loss = model(x, y)
            dist.barrier()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ```

    ## Good
    ```python
    import torch.distributed as dist

    def train(model, loader, optimizer, total):
        for x, y in loader:
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    ```
    """
    for loop in info.training_loops:
        for word in ("barrier", "item"):
            call = next(_find_waits(info, loop, word), None)
            if call is not None:
                yield Hit(
                    call,
                    f"{info.script.source(call)} stands between forward and backward of each step",
                    "at any N: the device runs dry before backward; every rank waits for the "
                    "slowest",
                    f"{info.script.source(call)}  # after optimizer.step(), when it is printed"
                    if word == "item"
                    else "# delete it: backward synchronises the ranks by itself",
                )


def _find_waits(info: ScriptInfo, loop: ast.For | ast.While, word: str) -> Iterator[ast.Call]:
    """Calls in the loop's own block, after a forward and before the first backward."""
    backward = next(c for c in info.backward_calls if info.script.is_inside(c, loop))
    loss = _root(info, backward)
    for call in info.script.calls_named(word):
        if not info.script.is_inside(call, loop) or call.lineno >= backward.lineno:
            continue
        if next(info.script.parent_loops(call), None) is not loop:
            continue
        conditional = any(
            isinstance(above, ast.If) and not info.script.is_inside(backward, above)
            for above in info.script.ancestors(call)
            if info.script.is_inside(above, loop)
        )
        if conditional or _checks_for_nan(info, call):
            continue
        if _is_after_forward(info, loop, call, loss):
            yield call


def _root(info: ScriptInfo, backward: ast.Call) -> str:
    """The name of the loss that backward is called on."""
    owner = info.script.owner(backward)
    if info.script.full_name(backward) or (
        owner is not None and info.is_accelerator(owner) and backward.args
    ):
        owner = backward.args[0] if backward.args else None
    while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
        owner = owner.args[0] if owner.args else owner.func.value
    for scaled in info.origins.calls(owner):
        if info.script.call_name(scaled) == "scale_loss" and scaled.args:
            return info.script.dotted_name(scaled.args[0])
    return info.script.dotted_name(owner)


def _is_after_forward(
    info: ScriptInfo, loop: ast.For | ast.While, call: ast.Call, loss: str
) -> bool:
    """The loss has been computed, in this turn of the loop, before the call."""
    return any(
        info.script.dotted_name(target) == loss and plain.lineno < call.lineno
        for plain in info.script.all(ast.Assign)
        if info.script.is_inside(plain, loop)
        for target in plain.targets
    )


def _checks_for_nan(info: ScriptInfo, call: ast.Call) -> bool:
    """A step that looks for NaN before backward has to wait, and waits for a reason."""
    loop = next(info.script.parent_loops(call), None)
    checks = info.script.calls_named("isfinite", "isnan", "isinf")
    return any(next(info.script.parent_loops(check), None) is loop for check in checks)


@rule("INS109", Severity.ERROR, "An optimizer steps on some ranks only.")
def _step_on_some_ranks(info: ScriptInfo) -> Iterator[Hit]:
    """After backward every rank has the same gradient, and every rank steps with it. Under
    `if rank == 0` the parameters of rank 0 alone change: from N = 2 on, the others compute the
    gradients of the first model for ever. Nothing waits and nothing fails; instep finds the
    difference when it compares the models.

    ## Bad
    ```python
    import instep
    from torch.utils.data import DataLoader

    model = instep.replicate(model)
    for x, y in instep.shard(DataLoader(train_set, batch_size=64)):
        loss_function(model(x), y).backward()
        if instep.rank == 0:
            optimizer.step()
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader

    model = instep.replicate(model)
    for x, y in instep.shard(DataLoader(train_set, batch_size=64)):
        loss_function(model(x), y).backward()
        optimizer.step()
    ```
    """
    for call in info.script.calls_named("step"):
        guards = info.guards.local_guards(call)
        stepped = next((n for n in (*call.args, info.script.owner(call)) if _steps(info, n)), None)
        if stepped is None or not guards or guards[0].is_scope:
            continue
        loop = next(info.script.parent_loops(call), None)
        near = [c for c in info.script.all(ast.Call) if info.script.are_in_one_function(c, call)]
        near = [c for c in near if loop is None or info.script.is_inside(c, loop)]
        backwards = [c for c in near if c in info.backward_calls]
        if not backwards or any(info.guards.local_guards(each) for each in backwards):
            continue  # a model that these ranks alone train
        is_sent = any(info.script.call_name(c).startswith("broadcast") for c in near)
        if is_sent or any(info.script.are_exclusive(c, call) for c in near if _is_like(c, call)):
            continue
        yield Hit(
            call,
            f"{info.script.source(call.func)} is reached only where {guards[0].condition}",
            "from N = 2 on, the ranks that do not come here keep the parameters of before",
            f"{info.script.source(call)}  # on every rank",
        )


def _steps(info: ScriptInfo, node: ast.expr | None) -> bool:
    """Whether a value is an optimizer, by what made it or by its name."""
    made = [info.script.full_name(each) for each in info.origins.calls(node)]
    if any("lr_scheduler" in each for each in made):
        return False
    name = info.script.dotted_name(node).split(".")[-1].lower()
    is_named = "optim" in name and "sched" not in name
    return is_named or any(each.startswith("torch.optim.") for each in made)


def _is_like(one: ast.Call, other: ast.Call) -> bool:
    return one is not other and ast.dump(one) == ast.dump(other)
