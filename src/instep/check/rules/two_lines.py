"""INS210, INS309, INS407: metrics, models and learning rates of one rank's rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import TAKE_MEAN, Hit, Severity, rule
from instep.check.rules import counting
from instep.check.script_info import ScriptInfo

DEPTH = 4
_COMBINING = {
    "numpy.array", "numpy.concatenate", "numpy.hstack", "numpy.mean", "numpy.vstack",
    "statistics.fmean", "statistics.mean", "torch.cat", "torch.stack", "torch.tensor",
}  # fmt: skip
"""Functions of a list that a loop has filled; `sum` and those of sklearn.metrics, too."""
_JOINING = {
    "numpy.concatenate", "numpy.hstack", "numpy.vstack", "torch.cat", "torch.stack",
}  # fmt: skip
_GATHER = "{name}.append(instep.gather_rows(value))  # in the loop, on every rank"
_AVERAGES = {"avg", "average", "global_avg"}
"""Attributes of the meters that scripts define."""
_HAPPENS = "from N = 2 on, the result differs by rank, and from that of one process"
_ALIKE = "the means of all ranks count alike, whatever their rows: not the mean of one process"


def has_own_rows(info: ScriptInfo, loop: ast.For) -> bool:
    """Whether a loop runs over instep.shard(…), or over a loader with a DistributedSampler."""
    made = [call for call in info.origins.calls(info.loop_source(loop)) if call in info.loaders]
    is_sampled = bool(made) and all(info.sampler_of(loader) for loader in made)
    return is_sampled or counting.sharded_loader(info, loop.iter) is not None


@rule("INS210", Severity.WARNING, "A metric is that of one rank's rows of instep.shard(loader).")
def _metric_of_own_rows(info: ScriptInfo) -> Iterator[Hit]:
    """`instep.shard(loader)` hands this rank its block of every batch. What a script adds up
    itself, and divides by a count that it adds up too, is the metric of this rank's rows: it
    differs by rank and from that of one process, and so does what is decided by it (the best
    checkpoint, the end of training). So is what it keeps in a list or in a meter of its own, and
    what one rank alone reads of the loader. `instep.Mean` and `instep.Accuracy` count on all ranks.

    ## Bad
    ```python
    import instep
    from torch.utils.data import DataLoader

    loader = instep.shard(DataLoader(test_set, batch_size=64))
    correct = total = 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    print(correct / total)
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader

    loader = instep.shard(DataLoader(test_set, batch_size=64))
    accuracy = instep.Accuracy()
    for x, y in loader:
        accuracy.update(model(x), y)
    print(accuracy.compute())
    ```
    """
    quotients = list(_quotients(info))
    for name, count, place in quotients:
        yield Hit(place, f"{name} and {count} count this rank's rows", _HAPPENS, TAKE_MEAN)
    divided = {(info.script.function_of(place), name) for name, _, place in quotients}
    for name, choice in _choices_by_sums(info):
        if (info.script.function_of(choice), name) not in divided:
            test = info.script.source(choice.test)
            yield Hit(choice, f"{test} decides by {name} of this rank's rows", _HAPPENS, TAKE_MEAN)
    yield from _kept_values(info)
    yield from _reads_on_some_ranks(info)


def _quotients(info: ScriptInfo) -> Iterator[tuple[str, str, ast.AST]]:
    """Sums over this rank's rows divided by their count: the names of both, and the place."""
    for numerator, denominator, place in counting.divisions(info):
        name, count = counting.count_name(numerator), _own_count(info, denominator, place)
        if name is None or count is None or name == count:
            continue
        loaders = counting.sharded_loaders_of(info, place, name)
        if not counting.is_reduced_nearby(info, place) and any(loaders):
            yield name, count, place


def _kept_values(info: ScriptInfo) -> Iterator[Hit]:
    """The first use of each list or meter of this rank's values in a function, one a statement."""
    seen: set[object] = set()
    for name, place in _uses_of_kept_values(info):
        known = {(info.script.function_of(place), name), info.script.statement_of(place)}
        if not known & seen:
            mend = _GATHER.format(name=name) if _joins_rows(info, place) else TAKE_MEAN
            if _is_reduced_by_its_class(info, place):
                yield Hit(place, f"{name} averages the ranks' means of their rows", _ALIKE, mend)
            else:
                yield Hit(place, f"{name} holds values of this rank's rows", _HAPPENS, mend)
        seen |= known


def _reads_on_some_ranks(info: ScriptInfo) -> Iterator[Hit]:
    """Loops over instep.shard(…) that one rank alone runs, in no single_process_scope."""
    for loop in info.script.all(ast.For):
        is_sharded = counting.sharded_loader(info, loop.iter) is not None
        guard = info.guards.effective_guard(loop)
        if is_sharded and guard is not None and not guard.is_scope:
            source = info.script.source(loop.iter)
            yield Hit(
                loop,
                f"{source} is read only where {guard.condition}, and has this rank's rows",
                "from N = 2 on, no rank sees the other rows",
                f"for … in {source}:  # on every rank; print on one",
            )


def _choices_by_sums(info: ScriptInfo) -> Iterator[tuple[str, ast.If]]:
    """`if total < best:` after a loop over instep.shard(…) that adds up `total` of its rows, in no
    loop that a choice ends, which is INS106."""
    for choice in info.script.all(ast.If):
        outer = [*info.script.parent_loops(choice)]
        if any(isinstance(each, ast.Break | ast.Continue) for o in outer for each in ast.walk(o)):
            continue
        compared = [
            side
            for test in ast.walk(choice.test)
            if isinstance(test, ast.Compare)
            for side in (test.left, *test.comparators)
            if isinstance(side, ast.Name)
        ]
        for name in compared:
            if _is_sum_of_own_rows(info, name) and not counting.is_reduced_nearby(info, choice):
                yield name.id, choice
                break


def _is_sum_of_own_rows(info: ScriptInfo, name: ast.Name) -> bool:
    return any(
        counting.sharded_loader(info, loop.iter) is not None
        and not info.script.is_inside(name, loop)
        and depends_on_rows(info, loop, changed.value, DEPTH)
        for changed, loop in counting.additions(info, name, name.id)
    )


def _joins_rows(info: ScriptInfo, place: ast.AST) -> bool:
    """Whether this joins the outputs of batches, as for a metric of sklearn, and sums nothing."""
    full = info.script.full_name(place) if isinstance(place, ast.Call) else ""
    return full in _JOINING or full.startswith("sklearn.metrics.")


def _own_count(info: ScriptInfo, denominator: ast.expr, place: ast.AST) -> str | None:
    """What is divided by, if it counts this rank's rows or the batches of instep.shard(…)."""
    name = counting.count_name(denominator)
    if name is not None and any(counting.sharded_loaders_of(info, place, name)):
        return name
    if not isinstance(denominator, ast.Call) or info.script.call_name(denominator) != "len":
        return None
    is_of_shard = denominator.args and counting.sharded_loader(info, denominator.args[0])
    return info.script.source(denominator) if is_of_shard else None


def _uses_of_kept_values(info: ScriptInfo) -> Iterator[tuple[str, ast.expr]]:
    """What a loop over instep.shard(…) keeps in a list or in a meter of the script's own, and where
    that is combined after the loop."""
    for call in info.script.calls_named("append", "extend", "update"):
        owner = info.script.owner(call)
        name = info.script.dotted_name(owner)
        loops = [
            loop
            for loop in info.script.parent_loops(call)
            if isinstance(loop, ast.For) and counting.sharded_loader(info, loop.iter) is not None
        ]
        if not loops or not name or not call.args or counting.is_reduced_nearby(info, call):
            continue
        if not depends_on_rows(info, loops[0], call.args[0], DEPTH):
            continue
        made = [info.script.full_name(each) for each in info.origins.calls(owner)]
        if any(each.startswith(("instep.", "torchmetrics.")) for each in made):
            continue
        for use in _uses(info, name, is_meter=info.script.call_name(call) == "update"):
            if info.script.are_in_one_function(use, call) and not info.script.is_inside(
                use, loops[0]
            ):
                yield name, use


def _is_reduced_by_its_class(info: ScriptInfo, place: ast.expr) -> bool:
    """Whether `place` reads a meter whose class brings the values of the ranks together."""
    if not isinstance(place, ast.Attribute):
        return False
    made = {info.script.call_name(each) for each in info.origins.calls(place.value)}
    return any(
        each.name in made
        and any(info.script.is_inside(call, each) for call in info.reduction_calls)
        for each in info.script.all(ast.ClassDef)
    )


def _uses(info: ScriptInfo, name: str, *, is_meter: bool) -> Iterator[ast.expr]:
    """`numpy.mean(name)` and the like; for a meter `name.avg`."""
    if is_meter:
        for read in info.script.all(ast.Attribute):
            if read.attr in _AVERAGES and info.script.dotted_name(read.value) == name:
                yield read
        return
    for call in info.script.all(ast.Call):
        full = info.script.full_name(call)
        is_sum = isinstance(call.func, ast.Name) and call.func.id == "sum"
        combines = is_sum or full in _COMBINING or full.startswith("sklearn.metrics.")
        if combines and any(info.script.dotted_name(given) == name for given in call.args):
            yield call


def depends_on_rows(info: ScriptInfo, loop: ast.For, node: ast.expr, depth: int) -> bool:
    """Whether a value is computed from what the loop runs over."""
    rows = {
        each.id
        for each in ast.walk(loop.target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)  # no `state` of state.i
    }
    if "enumerate" in map(info.script.call_name, ast.walk(loop.iter)):
        number = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        rows.discard(info.script.dotted_name(number))
    for name in ast.walk(node) if depth else ():
        if not isinstance(name, ast.Name):
            continue
        if name.id in rows:
            return True
        for bound in info.origins.bindings(name):
            if info.script.is_inside(bound.statement, loop) and depends_on_rows(
                info, loop, bound.value, depth - 1
            ):
                return True
    return False


@rule("INS309", Severity.ERROR, "A model is trained on instep.shard's rows, without replicate.")
def _not_replicated(info: ScriptInfo) -> Iterator[Hit]:
    """`instep.shard` hands each rank its rows of every batch; `instep.replicate` brings the
    gradients of all ranks together. Without it each rank trains a model of its own on 1/N of
    the data, and these N models drift apart.

    ## Bad
    ```python
    import instep
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(10, 2)
    for x, y in instep.shard(DataLoader(train_set, batch_size=64)):
        loss_function(model(x), y).backward()
    ```

    ## Good
    ```python
    import instep
    import torch
    from torch.utils.data import DataLoader

    model = instep.replicate(torch.nn.Linear(10, 2))
    for x, y in instep.shard(DataLoader(train_set, batch_size=64)):
        loss_function(model(x), y).backward()
    ```
    """
    if info.ddp_calls or info.reduction_calls or any(info.script.calls_named("replicate")):
        return
    for loop in info.training_loops:
        source = loop.iter if isinstance(loop, ast.For) else None
        if source is None or counting.sharded_loader(info, source) is None:
            continue
        calls = info.script.calls_inside(loop)
        models = [call.func for call in calls if _is_visible_model(info, call.func)]
        if models:
            name = info.script.source(models[0])
            yield Hit(
                models[0],
                f"{name} is trained on this rank's rows, and nothing brings the gradients together",
                "with N processes there are N models, each of 1/N of the data",
                f"{name} = instep.replicate({name})  # before the loop",
            )


def _is_visible_model(info: ScriptInfo, node: ast.expr) -> bool:
    """Whether a value is visibly a model: of a class of this script or of torch, and no loss."""
    names = {info.script.call_name(made) for made in info.origins.calls(node)}
    own = [
        made.name
        for made in info.script.all(ast.ClassDef)
        if any(info.script.full_name(base) == "torch.nn.Module" for base in made.bases)
        and "Loss" not in made.name
    ]
    full = {info.script.full_name(made) for made in info.origins.calls(node)}
    return bool(names & {*own} or full & {"torch.nn.Linear", "torch.nn.Sequential"}) or any(
        name.startswith("torchvision.models.") for name in full
    )


@rule("INS407", Severity.ERROR, "ReduceLROnPlateau gets the loss of one rank's rows.")
def _plateau_of_own_rows(info: ScriptInfo) -> Iterator[Hit]:
    """`ReduceLROnPlateau` compares the number that it is given with those before it. The loss
    of one rank's rows, of `instep.shard(loader)` or of a DistributedSampler, differs by rank, so
    that the ranks lower their learning rates in different epochs, and their models drift apart.

    ## Bad
    ```python
    import instep
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from torch.utils.data import DataLoader

    scheduler = ReduceLROnPlateau(optimizer)
    loader = instep.shard(DataLoader(test_set, batch_size=64))
    for epoch in range(90):
        total = 0.0
        for x, y in loader:
            total += loss_function(model(x), y).item()
        scheduler.step(total)
    ```

    ## Good
    ```python
    import instep
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from torch.utils.data import DataLoader

    scheduler = ReduceLROnPlateau(optimizer)
    loader = instep.shard(DataLoader(test_set, batch_size=64))
    for epoch in range(90):
        mean = instep.Mean()
        for x, y in loader:
            mean.update(loss_function(model(x), y), len(x))
        scheduler.step(mean.compute())
    ```
    """
    for call in info.script.calls_named("step"):
        made = map(info.script.full_name, info.origins.calls(info.script.owner(call)))
        if not call.args or not any(name.endswith(".ReduceLROnPlateau") for name in made):
            continue
        if _is_of_own_rows(info, call.args[0], DEPTH):
            value = info.script.source(call.args[0])
            yield Hit(
                call,
                f"{value} is of this rank's rows, and ReduceLROnPlateau decides by it",
                "from N = 2 on, the ranks get different learning rates",
                f"dist.all_reduce({value})  # as a tensor, before it"
                if info.ddp_calls
                else "mean = instep.Mean()\n"
                "mean.update(loss, len(x))  # in the loop\n"
                f"{info.script.source(call.func)}(mean.compute())",
            )


def _is_of_own_rows(info: ScriptInfo, node: ast.expr, depth: int) -> bool:
    """Whether a number is made, in the same text or in a function of the script, from what a loop
    over this rank's rows computes, and not reduced."""
    if depth == 0 or counting.is_reduced_nearby(info, node):
        return False
    if isinstance(node, ast.Call):
        returned = [
            inner.value
            for function in info.called_functions(node)
            for inner in ast.walk(function)
            if isinstance(inner, ast.Return) and inner.value is not None
        ]
        if returned:
            return any(_is_of_own_rows(info, value, depth - 1) for value in returned)
        if info.script.call_name(node) == "compute":
            return False
    if isinstance(node, ast.Name):
        if any(has_own_rows(info, loop) for _, loop in counting.additions(info, node, node.id)):
            return True
        bound = info.origins.bindings(node)
        if any(_is_in_loop_of_own_rows(info, each.statement) for each in bound):
            return not any(info.script.call_name(each.value) == "compute" for each in bound)
        return any(_is_of_own_rows(info, each.value, depth - 1) for each in bound)
    return any(
        _is_of_own_rows(info, inner, depth)
        for inner in ast.iter_child_nodes(node)
        if isinstance(inner, ast.expr)
    )


def _is_in_loop_of_own_rows(info: ScriptInfo, place: ast.AST) -> bool:
    return any(
        isinstance(loop, ast.For) and has_own_rows(info, loop)
        for loop in info.script.parent_loops(place)
    )
