"""INS1xx: what makes ranks wait for each other for ever, or at every step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.facts import Facts
from instep.check.finding import Hit, Scope, Severity, rule
from instep.check.ranks import Guard
from instep.check.script import constant, keyword

WAITING_SAVES = {
    "save_state", "save_checkpoint", "consolidate_state_dict", "full_optim_state_dict",
}  # fmt: skip


@rule(
    "INS101",
    "collective-on-some-ranks",
    Severity.ERROR,
    "A collective is called by some ranks only.",
)
def collective_on_some_ranks(facts: Facts) -> Iterator[Hit]:
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
    if any(facts.script.calls_of("horovod.torch.join")):
        return  # ranks that have joined answer every collective with zeros
    for call in facts.script.all(ast.Call):
        inner = _talks(facts, call)
        guards = facts.ranks.guards(call)
        if inner is None or not guards or _paired(facts, call, guards[0]):
            continue
        if keyword(inner, "group") is not None or keyword(inner, "process_set") is not None:
            continue
        name = facts.script.source(call.func)
        through = "" if inner is call else f" (it calls {facts.script.source(inner.func)})"
        yield Hit(
            call,
            f"{name}{through} is reached only where {facts.script.source(guards[0].test)}",
            "from N = 2 on, the ranks that do not come here leave the others waiting",
            f"{facts.script.source(call)}  # on every rank, before or after the `if`",
        )


def _talks(facts: Facts, call: ast.Call) -> ast.Call | None:
    if facts.is_collective(call):
        return call
    return next((t for f in facts.local_functions(call) if (t := facts.talking(f))), None)


def _paired(facts: Facts, call: ast.Call, guard: Guard) -> bool:
    """The other ranks make the same call in the same function: `rank 0 goes first`."""
    function, word = facts.script.function_of(call), facts.script.called(call)
    for other in facts.script.calls_named(word):
        if other is not call and facts.script.function_of(other) is function:
            if facts.script.exclusive(call, other):
                return True
            guards = facts.ranks.guards(other)
            if any(g.zero != guard.zero or g.kind != guard.kind for g in guards):
                return True
    return False


@rule(
    "INS102",
    "model-call-on-some-ranks",
    Severity.ERROR,
    "A DistributedDataParallel model is called by some ranks only.",
)
def model_call_on_some_ranks(facts: Facts) -> Iterator[Hit]:
    """A model in DistributedDataParallel talks: its forward broadcasts the buffers of
    BatchNorm, its backward reduces gradients. Called on rank 0 only, it waits for the others
    from N = 2 on. The module inside, `model.module`, does not talk.

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
    for call in facts.script.all(ast.Call):
        if not isinstance(call.func, ast.Name | ast.Attribute) or not facts.wraps:
            continue
        wrap = facts.wrapper(call.func)
        guard = facts.ranks.guard_of_call(call, depth=1) if wrap else None
        if wrap is None or guard is None or _harmless_in_evaluation(facts, call, wrap):
            continue
        name = facts.script.source(call.func)
        yield Hit(
            call,
            f"{name} is a DistributedDataParallel model and is called only where "
            f"{facts.script.source(guard.test)}",
            "from N = 2 on, it waits for the other ranks: its forward broadcasts buffers",
            facts.script.source(call).replace(f"{name}(", f"{name}.module(", 1),
        )


def _harmless_in_evaluation(facts: Facts, call: ast.Call, wrap: ast.Call) -> bool:
    """In eval(), only a model with buffers talks, and only if it was not told not to."""
    function = facts.script.function_of(call)
    scope = function or facts.script.tree
    calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call)]
    called = {facts.script.called(c) for c in calls}
    decorators = [facts.script.source(d) for d in getattr(function, "decorator_list", [])]
    if called & {"no_grad", "inference_mode"} or any("no_grad" in d for d in decorators):
        return True  # its one broadcast is answered by the others' next forward
    if "eval" not in called:
        return False
    silent = constant(keyword(wrap, "broadcast_buffers")) is False
    return silent or not facts.has_batch_norm


@rule(
    "INS103",
    "waiting-save-on-some-ranks",
    Severity.ERROR,
    "A save that all ranks must enter is called by some ranks only.",
)
def waiting_save_on_some_ranks(facts: Facts) -> Iterator[Hit]:
    """Some ways to save collect pieces from every rank, or wait for every rank at the end:
    `accelerator.save_state`, DeepSpeed's `engine.save_checkpoint`,
    `optimizer.consolidate_state_dict`, `torch.distributed.checkpoint.save`. They choose by
    themselves who writes. Under `if rank == 0` they hang from N = 2 on.

    ## Bad
    ```python
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.is_main_process:
        accelerator.save_state("checkpoint")
    ```

    ## Good
    ```python
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.save_state("checkpoint")
    ```
    """
    for call in facts.script.all(ast.Call):
        guards = facts.ranks.guards(call) if _waits(facts, call) else []
        if guards:
            yield Hit(
                call,
                f"{facts.script.source(call.func)} waits for every rank, but is called only "
                f"where {facts.script.source(guards[0].test)}",
                "from N = 2 on, it never returns",
                f"{facts.script.source(call)}  # on every rank; it chooses who writes",
            )


def _waits(facts: Facts, call: ast.Call) -> bool:
    full, word = facts.script.full_name(call), facts.script.called(call)
    if full in {"torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"}:
        return True
    if word not in WAITING_SAVES or not isinstance(call.func, ast.Attribute):
        return False
    if word == "save_checkpoint":
        engine = facts.origins.calls(call.func.value)
        return any(facts.script.full_name(c) == "deepspeed.initialize" for c in engine)
    if word == "save_state":
        return facts.is_accelerator(call.func.value)
    return True


@rule(
    "INS104",
    "one-name-in-flight",
    Severity.WARNING,
    "Several Horovod tensors travel under one name.",
)
def one_name_in_flight(facts: Facts) -> Iterator[Hit]:
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
    for call in facts.script.all(ast.Call):
        full = facts.script.full_name(call)
        if not full.startswith("horovod.torch.") or full.split(".")[-1] not in {
            "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "allgather",
            "allgather_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
        }:  # fmt: skip
            continue
        name = constant(keyword(call, "name"))
        if not isinstance(name, str):
            continue
        tensors = _tensors_handed_in(facts, call)
        looped = "async" in full and any(facts.script.loops_around(call))
        if name in seen or len(tensors) > 1 or looped:
            yield Hit(
                call,
                f"several tensors are sent under the one name {name!r}",
                "at any N: an error when two are in flight, else a stall report without meaning",
                facts.script.source(call).replace(repr(name), "name"),
            )
        seen[name] = call


def _tensors_handed_in(facts: Facts, call: ast.Call) -> set[str]:
    """What the callers of this function pass for the tensor that is sent."""
    function = facts.script.function_of(call)
    if function is None or not call.args:
        return set()
    parameters = [a.arg for a in function.args.args if a.arg != "self"]
    sent = re.findall(r"\w+", facts.origins.text(call.args[0]))
    if not parameters or parameters[0] not in sent:
        return set()
    return {facts.script.source(c.args[0]) for c in facts.origins.calls_of(function) if c.args}


@rule(
    "INS105",
    "wait-before-backward",
    Severity.WARNING,
    "Each step waits between forward and backward.",
    Scope.PARALLEL,
)
def wait_before_backward(facts: Facts) -> Iterator[Hit]:
    """`.item()` and `barrier()` stop the program until the device (or the slowest rank) has
    caught up. Between forward and backward of each step this empties the queue of work
    just before the longest part of the step, at any N, and at large N every rank pays for
    the slowest one. Nothing needs it: gradients are reduced in backward anyway. Do it after
    `optimizer.step()`, and only when something is printed.

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
    for loop in facts.training_loops:
        for word in ("barrier", "item"):
            call = next(_waits_between(facts, loop, word), None)
            if call is not None:
                yield Hit(
                    call,
                    f"{facts.script.source(call)} stands between forward and backward of each step",
                    "at any N: the device runs dry before backward; every rank waits for the "
                    "slowest",
                    f"{facts.script.source(call)}  # after optimizer.step(), when it is printed"
                    if word == "item"
                    else "# delete it: backward synchronises the ranks by itself",
                )


def _waits_between(facts: Facts, loop: ast.For | ast.While, word: str) -> Iterator[ast.Call]:
    """Calls in the loop's own block, after a forward and before the first backward."""
    backward = next(c for c in facts.backwards if facts.script.inside(c, loop))
    loss = _root(facts, backward)
    for call in facts.script.calls_named(word):
        if not facts.script.inside(call, loop) or call.lineno >= backward.lineno:
            continue
        if next(facts.script.loops_around(call), None) is not loop:
            continue
        conditional = any(
            isinstance(above, ast.If) and not facts.script.inside(backward, above)
            for above in facts.script.ancestors(call)
            if facts.script.inside(above, loop)
        )
        if conditional or _checks_for_nan(facts, call):
            continue
        if _after_forward(facts, loop, call, loss):
            yield call


def _root(facts: Facts, backward: ast.Call) -> str:
    """The name of the loss that backward is called on."""
    owner = backward.func.value if isinstance(backward.func, ast.Attribute) else None
    if facts.script.full_name(backward) or (
        owner is not None and facts.is_accelerator(owner) and backward.args
    ):
        owner = backward.args[0] if backward.args else None
    while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
        owner = owner.args[0] if owner.args else owner.func.value
    for scaled in facts.origins.calls(owner):
        if facts.script.called(scaled) == "scale_loss" and scaled.args:
            return facts.script.dotted(scaled.args[0])
    return facts.script.dotted(owner)


def _after_forward(
    facts: Facts, loop: ast.For | ast.While, call: ast.Call, loss: str
) -> bool:
    """The loss has been computed, in this turn of the loop, before the call."""
    return any(
        facts.script.dotted(target) == loss and plain.lineno < call.lineno
        for plain in facts.script.all(ast.Assign)
        if facts.script.inside(plain, loop)
        for target in plain.targets
    )


def _checks_for_nan(facts: Facts, call: ast.Call) -> bool:
    """`value = loss.item()` that is then looked at by isfinite or isnan is there for a reason."""
    checks = list(facts.script.calls_named("isfinite", "isnan", "isinf"))
    statement = facts.script.statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {facts.script.dotted(target) for target in targets}
    return any(
        facts.script.inside(call, check) or (check.args and facts.script.dotted(check.args[0]) in names)
        for check in checks
    )
