"""INS201 to INS203 and INS209: counts, and their denominators."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import COUNT_HITS, TAKE_MEAN, Hit, Severity, rule
from instep.check.script import keyword
from instep.check.script_info import ScriptInfo, split_words

OUT_OF_PLACE = {
    f"horovod.torch.{name}"
    for name in ("allreduce", "allgather", "broadcast", "grouped_allreduce", "alltoall",
                 "reducescatter", "broadcast_object", "allgather_object")
} | {
    f"instep.{name}"
    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "broadcast_object",
                 "all_gather_object", "mean", "sum")
}  # fmt: skip


@rule("INS201", Severity.ERROR, "The result of an out-of-place reduction is not used.")
def _reduction_thrown_away(info: ScriptInfo) -> Iterator[Hit]:
    """`hvd.allreduce(x)`, `instep.all_reduce(x)` and `accelerator.reduce(x)` return the
    result and leave `x` alone. As a statement they only cost time: from N = 2 on, `x` is
    still this rank's own value, and dividing it by N makes it wrong a second time. A result
    that is given a name which nothing reads is lost in the same way.

    ## Bad
    ```python
    import horovod.torch as hvd

    def mean(value):
        total = value.clone()
        hvd.allreduce(total)
        return total
    ```

    ## Good
    ```python
    import horovod.torch as hvd

    def mean(value):
        return hvd.allreduce(value)
    ```
    """
    for statement in info.script.all(ast.Expr):
        call = statement.value
        if not isinstance(call, ast.Call) or not call.args:
            continue
        method = isinstance(call.func, ast.Attribute) and info.is_accelerator(call.func.value)
        if info.script.full_name(call) in OUT_OF_PLACE or (
            method and info.script.call_name(call) in {"gather", "reduce", "gather_for_metrics"}
        ):
            value, text = info.script.source(call.args[0]), info.script.source(call)
            if not _is_of_value(info, call.args[0]):
                continue  # allreduce of a temporary: an old way to write a barrier
            yield Hit(
                call,
                f"the result of {text} is thrown away; {value} keeps this rank's value",
                "from N = 2 on, every rank goes on with its own number",
                f"{value} = {text}",
            )
    read = {name.id for name in info.script.all(ast.Name) if isinstance(name.ctx, ast.Load)}
    for assignment in info.script.all(ast.Assign):
        target, call = assignment.targets[0], assignment.value
        if not isinstance(target, ast.Name) or not isinstance(call, ast.Call) or not call.args:
            continue
        if target.id in read or not target.id.strip("_") or not _is_of_value(info, call.args[0]):
            continue
        if _returns_reduced(info, call):
            value = info.script.source(call.args[0])
            yield Hit(
                call,
                f"{target.id} is never read; {value} keeps this rank's value",
                "from N = 2 on, what the script goes on with is each rank's own number",
                f"{target.id}  # where {value} is used",
            )


def _is_of_value(info: ScriptInfo, node: ast.expr) -> bool:
    """Whether this is a value of the script: `loss`, `loss.detach()`, and no `torch.ones(1)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    is_value = isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
    return is_value and not info.script.full_name(node)


def _returns_reduced(info: ScriptInfo, call: ast.Call) -> bool:
    """Whether a call reduces its argument and leaves that as it is: an out-of-place reduction, or a
    function of this script that reduces a copy and returns it."""
    if info.script.full_name(call) in OUT_OF_PLACE:
        return True
    for function in info.called_functions(call):
        given = {each.arg for each in function.args.args}
        returns = any(isinstance(each, ast.Return) and each.value for each in ast.walk(function))
        for inner in info.script.calls_in(function) if returns else ():
            is_of_copy = inner.args and info.script.source(inner.args[0]) not in given
            if info.is_collective(inner) and is_of_copy:
                return True
    return False


@rule(
    "INS202", Severity.ERROR, "A count of all ranks is divided by the length of one rank's share."
)
def _metric_over_local_length(info: ScriptInfo) -> Iterator[Hit]:
    """With a DistributedSampler `len(loader)` and `len(sampler)` are this rank's share,
    rounded up, while a count summed over all ranks has every rank's samples in it. The
    metric comes out about N times too large (and with padding it is never exact). Reduce
    the count of samples together with the count of hits.

    ## Bad
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def evaluate(model, dataset):
        sampler = DistributedSampler(dataset)
        correct = count_correct(model, DataLoader(dataset, sampler=sampler))
        dist.all_reduce(correct)
        return correct / len(sampler)
    ```

    ## Good
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def evaluate(model, dataset):
        sampler = DistributedSampler(dataset)
        counts = count_correct_and_seen(model, DataLoader(dataset, sampler=sampler))
        dist.all_reduce(counts)
        return counts[0] / counts[1]
    ```
    """
    for numerator, denominator, place in divisions(info):
        measured = _length_of_share(info, denominator)
        name = count_name(numerator)
        if measured is None or name is None:
            continue
        is_count = split_words(name) & {"correct", "corrects", "hits"}
        if is_count and _is_reduced(info, numerator):
            yield Hit(
                place,
                f"{name} is summed over all ranks, {info.script.source(measured)} is one "
                "rank's share",
                "from N = 2 on, the metric is about N times too large",
                f"dist.all_reduce(seen)  # a tensor that counts samples\n{name} / seen",
            )


@rule("INS203", Severity.ERROR, "One rank's count is divided by the length of the whole dataset.")
def _local_count_over_dataset(info: ScriptInfo) -> Iterator[Hit]:
    """The loader hands this rank one N-th of the samples, the count is never summed over
    the ranks, and yet it is divided by the length of the whole dataset: the accuracy falls
    with N, to a half with N = 2, to a quarter with N = 4.

    ## Bad
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))

    def evaluate(model):
        correct = 0
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum()
        return correct / len(dataset)
    ```

    ## Good
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))

    def evaluate(model):
        correct = seen = torch.zeros(())
        for x, y in loader:
            correct = correct + (model(x).argmax(1) == y).sum()
            seen = seen + len(y)
        dist.all_reduce(correct)
        dist.all_reduce(seen)
        return correct / seen
    ```
    """
    for numerator, denominator, place in divisions(info):
        name = count_name(numerator)
        whole = _length_of_dataset(info, denominator)
        if name is None or whole is None or not _is_filled_in_sharded_loop(info, place, name):
            continue
        if not is_reduced_nearby(info, place):
            yield Hit(
                place,
                f"{name} counts this rank's samples, {info.script.source(whole)} counts all",
                "with N processes the metric is about 1/N of what it should be",
                f"dist.all_reduce({name})  # a tensor; before the division",
            )


@rule(
    "INS209",
    Severity.ERROR,
    "What one rank adds up over instep.shard(loader) is divided by the length of the data set.",
)
def _share_over_dataset(info: ScriptInfo) -> Iterator[Hit]:
    """`instep.shard(loader)` hands this rank its block of every batch, so a sum in plain
    Python is this rank's share of the sum. Divided by the length of the whole data set it
    is about 1/N of the metric of one process, without a word. `instep.Mean` and
    `instep.Accuracy` count on all ranks, each sample once.

    ## Bad
    ```python
    import instep
    from torch.utils.data import DataLoader

    loader = instep.shard(DataLoader(test_set, batch_size=64))

    def evaluate(model):
        total = 0.0
        for x, y in loader:
            total += loss_function(model(x), y).item() * len(x)
        return total / len(loader.dataset)
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader

    loader = instep.shard(DataLoader(test_set, batch_size=64))

    def evaluate(model):
        mean = instep.Mean()
        for x, y in loader:
            mean.update(loss_function(model(x), y), len(x))
        return mean.compute()
    ```
    """
    for numerator, denominator, place in divisions(info):
        name = count_name(numerator)
        if name is None or is_reduced_nearby(info, place):
            continue
        for loader in sharded_loaders_of(info, place, name):
            if (whole := _length_of_whole(info, denominator, loader)) is not None:
                yield Hit(
                    place,
                    f"{name} is this rank's share, {info.script.source(whole)} counts the samples "
                    "of all ranks",
                    "with N processes the result is about 1/N of that of one process",
                    COUNT_HITS if _counts_hits(info, place, name) else TAKE_MEAN,
                )
                break


def _counts_hits(info: ScriptInfo, place: ast.AST, name: str) -> bool:
    """Whether what is added up is a comparison: `right += (output.argmax(1) == y).sum()`."""
    called = info.script.call_name
    parts = [part for changed, _ in additions(info, place, name) for part in ast.walk(changed)]
    return any(isinstance(part, ast.Compare) or called(part) == "eq" for part in parts)


def sharded_loaders_of(info: ScriptInfo, place: ast.AST, name: str) -> Iterator[ast.expr]:
    """What the loops run over in which `name += …` stands: `instep.shard(…)`, by its name."""
    for _, loop in additions(info, place, name):
        if (source := sharded_loader(info, loop.iter)) is not None:
            yield source


def additions(
    info: ScriptInfo, place: ast.AST, name: str
) -> Iterator[tuple[ast.AugAssign, ast.For]]:
    """Each `name += …` in the function of this place, with each loop in which it stands."""
    for changed in info.script.all(ast.AugAssign):
        is_this = info.script.dotted_name(changed.target) == name
        if is_this and info.script.are_in_one_function(changed, place):
            loops = info.script.parent_loops(changed)
            yield from ((changed, loop) for loop in loops if isinstance(loop, ast.For))


def sharded_loader(info: ScriptInfo, source: ast.expr) -> ast.expr | None:
    """What a loop runs over, without enumerate, tqdm and the like, if it is `instep.shard(…)`."""
    while isinstance(source, ast.Call) and source.args and _shard_call(info, source) is None:
        source = source.args[0]
    return source if _shard_call(info, source) is not None else None


def _shard_call(info: ScriptInfo, node: ast.expr) -> ast.Call | None:
    calls = info.origins.calls(node)
    return next((c for c in calls if info.script.full_name(c) == "instep.shard"), None)


def _length_of_whole(info: ScriptInfo, node: ast.expr, loader: ast.expr) -> ast.expr | None:
    """`loader.total_len`, `len(loader.dataset)`, or `len(…)` of the data set that the loader loads,
    or of a value from which that was made."""
    shard = _shard_call(info, loader)
    made = info.loader_of(shard.args[0]) if shard is not None and shard.args else None
    dataset = keyword(made, "dataset", 0) if made is not None else None
    wholes = [] if dataset is None else [dataset]
    wholes += [each for call in info.origins.calls(dataset) for each in call.args]
    texts = [info.script.source(whole) for whole in wholes]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr == "total_len":
            return inner
    for call, of in _lengths(info, node):
        if isinstance(of, ast.Attribute) and of.attr == "dataset":
            return call
        if info.script.source(of) in texts:
            return call
    return None


def divisions(info: ScriptInfo) -> Iterator[tuple[ast.expr, ast.expr, ast.AST]]:
    """The dividend, the divisor and the place of each division."""
    for binary in info.script.all(ast.BinOp):
        if isinstance(binary.op, ast.Div):
            yield binary.left, binary.right, binary
    for changed in info.script.all(ast.AugAssign):
        if isinstance(changed.op, ast.Div):
            yield changed.target, changed.value, changed


def _lengths(info: ScriptInfo, node: ast.expr) -> Iterator[tuple[ast.Call, ast.expr]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and info.script.call_name(inner) == "len" and inner.args:
            yield inner, inner.args[0]


def _length_of_share(info: ScriptInfo, node: ast.expr) -> ast.Call | None:
    """`len(loader)`, `len(sampler)` or `len(loader.sampler)` of a sharded loader."""
    if info.ranks.has_world_size(node):
        return None
    for call, of in _lengths(info, node):
        loader = info.loader_of(of)
        if isinstance(of, ast.Attribute) and of.attr == "sampler":
            loader = info.loader_of(of.value)
        if any(origin in info.samplers for origin in info.origins.of(of)) or (
            loader is not None and info.sampler_of(loader) is not None
        ):
            return call
    return None


def _length_of_dataset(info: ScriptInfo, node: ast.expr) -> ast.Call | None:
    """`len(loader.dataset)`, or `len(dataset)` of what a sampler was made for."""
    given = {info.script.source(d) for s in info.samplers if (d := keyword(s, "dataset", 0))}
    for call, of in _lengths(info, node):
        if isinstance(of, ast.Attribute) and of.attr == "dataset":
            return call
        if info.script.source(of) in given:
            return call
    return None


def count_name(node: ast.expr) -> str | None:
    """The name that is divided: `correct` in `100.0 * correct.item()`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id not in {"float", "int", "torch"}:
            return inner.id
    return None


def _is_reduced(info: ScriptInfo, numerator: ast.expr) -> bool:
    """Whether the number was summed over the ranks, in place or by assignment."""
    name = count_name(numerator)
    for call in info.reduction_calls:
        if call.lineno > numerator.lineno or not info.script.are_in_one_function(call, numerator):
            continue
        given = [*call.args, *(k.value for k in call.keywords)]
        if any(word in info.script.source(a) for a in given for word in ("AVG", "Average")):
            continue
        statement = info.script.statement_of(call)
        assigned = info.target_names(call) if isinstance(statement, ast.Assign) else ""
        if name in {info.script.source(a) for a in call.args} | {assigned}:
            return not info.script.full_name(call).startswith("horovod.") or bool(assigned)
    return False


def _is_filled_in_sharded_loop(info: ScriptInfo, place: ast.AST, name: str) -> bool:
    """Whether `name += …` stands in a loop over a sharded loader, in the same function."""
    sources = (info.loop_source(loop) for _, loop in additions(info, place, name))
    loaders = (info.loader_of(source) for source in sources)
    return any(loader is not None and info.sampler_of(loader) is not None for loader in loaders)


def is_reduced_nearby(info: ScriptInfo, place: ast.AST) -> bool:
    """Whether this function, or one that calls it, brings values of the ranks together."""
    function = info.script.function_of(place)
    near = {function}
    if function is not None:
        near |= {info.script.function_of(call) for call in info.origins.calls_of(function)}
    return any(info.script.function_of(call) in near for call in info.reduction_calls)
