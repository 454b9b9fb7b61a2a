"""INS106 to INS108: ranks that take other numbers of steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.rules import counting, two_lines
from instep.check.script_info import ScriptInfo

_MEAN_OF_LOSS = 'instep.all_reduce(loss.detach(), "mean")'
_CLOCKS = {
    *(f"time.{name}" for name in ("time", "monotonic", "perf_counter", "process_time", "time_ns")),
    *("datetime.datetime.now", "datetime.datetime.utcnow"),
}
_ORDER = (ast.Gt, ast.GtE, ast.Lt, ast.LtE)
_SENT = ("broadcast", "broadcast_object", "broadcast_object_list", "Join")
"""Calls by which a rank hears of a decision, or gets on without the others."""


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
        two_lines.has_own_rows(info, loop)
        and two_lines.depends_on_rows(info, loop, changed.value, two_lines.DEPTH)
        for changed, loop in counting.additions(info, name, name.id)
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


@rule("INS107", Severity.ERROR, "The clock decides how many steps a rank takes.")
def _steps_by_the_clock(info: ScriptInfo) -> Iterator[Hit]:
    """The clocks of two processes, and the times at which they read them, differ. Where a limit of
    time ends a training loop, some ranks take one step more: from N = 2 on they wait in it for
    ranks that have left, until the time-out, or are answered by a later collective. Let one rank
    decide for all, or end after a number of steps.

    ## Bad
    ```python
    import time
    from torch.nn.parallel import DistributedDataParallel

    def train(net, loader, limit):
        model, start = DistributedDataParallel(net), time.time()
        for x in loader:
            model(x).sum().backward()
            if time.time() - start > limit:
                break
    ```

    ## Good
    ```python
    import time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def train(net, loader, limit):
        model, start = DistributedDataParallel(net), time.time()
        for x in loader:
            model(x).sum().backward()
            late = torch.tensor(time.time() - start > limit)
            dist.broadcast(late, 0)
            if late:
                break
    ```
    """
    branches: list[ast.If | ast.While] = [*info.script.all(ast.If), *info.script.all(ast.While)]
    for branch in branches:
        if isinstance(branch, ast.While):
            loop: ast.AST | None = branch
        else:
            loop = next(info.script.parent_loops(branch), None)
            if not any(isinstance(each, ast.Break | ast.Return) for each in branch.body):
                continue
        if loop is None or not _has_backward(info, loop) or _is_decided_together(info, branch):
            continue
        if _is_time_limit(info, branch.test):
            yield Hit(
                branch,
                f"{info.script.source(branch.test)} is decided by this rank's clock",
                "from N = 2 on, some ranks take one step more, and wait there for the others",
                "dist.broadcast(late, 0)  # of a tensor: rank 0 decides for all",
            )


def _has_backward(info: ScriptInfo, loop: ast.AST) -> bool:
    """Whether a loop itself makes steps."""
    return any(call in info.backward_calls for call in info.script.calls_inside(loop))


def _is_decided_together(info: ScriptInfo, place: ast.AST) -> bool:
    function = info.script.function_of(place)
    sent = info.script.calls_named(*_SENT)
    return counting.is_reduced_nearby(info, place) or any(
        info.script.function_of(call) is function for call in sent
    )


def _is_time_limit(info: ScriptInfo, test: ast.expr) -> bool:
    """Whether a test compares the time that has passed with another number."""
    return any(
        isinstance(compared, ast.Compare)
        and any(isinstance(operator, _ORDER) for operator in compared.ops)
        and any(_reads_clock(info, side) for side in (compared.left, *compared.comparators))
        for compared in ast.walk(test)
    )


def _reads_clock(info: ScriptInfo, value: ast.expr) -> bool:
    """Whether it is the time now, or a difference to it that was computed here or in the same loop
    before."""
    if any(info.script.full_name(call) in _CLOCKS for call in ast.walk(value)):
        return True
    loop = next(info.script.parent_loops(value), None)
    return any(
        info.script.is_inside(bound.statement, loop)
        and any(isinstance(each, ast.BinOp) for each in (value, bound.value))
        and any(info.script.full_name(call) in _CLOCKS for call in ast.walk(bound.value))
        for name in ast.walk(value)
        if loop is not None
        for bound in info.origins.bindings(name)
    )


@rule("INS108", Severity.ERROR, "islice gives some ranks a batch more than others.")
def _batches_by_islice(info: ScriptInfo) -> Iterator[Hit]:
    """`islice(loader, rank, None, world_size)` hands each rank every N-th batch. If their number is
    no multiple of N, the first ranks get one more: from N = 2 on they wait in its backward for
    ranks whose loop has ended. A DistributedSampler makes the numbers equal, and `instep.shard`
    divides each batch.

    ## Bad
    ```python
    from itertools import islice
    from torch.nn.parallel import DistributedDataParallel

    def train(net, loader, rank, world_size):
        model = DistributedDataParallel(net)
        for x in islice(loader, rank, None, world_size):
            model(x).sum().backward()
    ```

    ## Good
    ```python
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    def train(net, dataset, epoch):
        model, sampler = DistributedDataParallel(net), DistributedSampler(dataset)
        sampler.set_epoch(epoch)
        for x in DataLoader(dataset, 64, sampler=sampler):
            model(x).sum().backward()
    ```
    """
    for loop in info.script.all(ast.For):
        if not _has_backward(info, loop) or _is_decided_together(info, loop):
            continue
        for call in ast.walk(loop.iter):
            if isinstance(call, ast.Call) and _is_slice_by_rank(info, call):
                yield Hit(
                    call,
                    f"{info.script.source(call)} hands each rank every N-th batch",
                    "from N = 2 on, ranks with one batch more wait in it for the others, unless "
                    "their number is a multiple of N",
                    "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))",
                )


def _is_slice_by_rank(info: ScriptInfo, call: ast.Call) -> bool:
    if info.script.full_name(call) != "itertools.islice" or len(call.args) != 4:
        return False
    _, start, stop, step = call.args
    to_the_end = isinstance(stop, ast.Constant) and stop.value is None
    return to_the_end and info.ranks.rank_type(start) == "rank" and info.ranks.is_world_size(step)
