"""INS104 and INS105: what slows or confuses each step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.facts import Facts
from instep.check.finding import Hit, Scope, Severity, rule
from instep.check.script import constant, keyword


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


def _after_forward(facts: Facts, loop: ast.For | ast.While, call: ast.Call, loss: str) -> bool:
    """The loss has been computed, in this turn of the loop, before the call."""
    return any(
        facts.script.dotted(target) == loss and plain.lineno < call.lineno
        for plain in facts.script.all(ast.Assign)
        if facts.script.inside(plain, loop)
        for target in plain.targets
    )


def _checks_for_nan(facts: Facts, call: ast.Call) -> bool:
    """A step that looks for NaN before backward has to wait, and waits for a reason."""
    loop = next(facts.script.loops_around(call), None)
    checks = facts.script.calls_named("isfinite", "isnan", "isinf")
    return any(next(facts.script.loops_around(check), None) is loop for check in checks)
