"""INS204 to INS208: evaluation, and the division of its data among the ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo, is_evaluation_text


@rule("INS204", Severity.WARNING, "DistributedSampler pads the evaluation data.")
def _padded_evaluation(info: ScriptInfo) -> Iterator[Hit]:
    """DistributedSampler gives every rank the same number of samples by repeating some, up
    to N - 1 of them. In training that is noise; in evaluation these samples count twice, and
    the metric depends on N. It is exact only where N divides the number of samples.

    ## Bad
    ```python
    from torch.utils.data import DataLoader, DistributedSampler

    val_loader = DataLoader(val_set, sampler=DistributedSampler(val_set, shuffle=False))
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader

    val_loader = instep.shard(DataLoader(val_set))
    ```
    """
    if _handles_remainder(info):
        return
    for sampler in info.samplers:
        if (
            info.is_for_evaluation(sampler)
            and constant(keyword(sampler, "drop_last", 5)) is not True
        ):
            dataset = info.script.source(keyword(sampler, "dataset", 0) or sampler)
            yield Hit(
                sampler,
                f"evaluation on {dataset} is padded to a multiple of the number of processes",
                f"when N does not divide len({dataset}), up to N - 1 samples count twice",
                f"loader = instep.shard(DataLoader({dataset}, batch_size=...))  # pads nothing",
            )


def _handles_remainder(info: ScriptInfo) -> bool:
    """The script computes `len(x) % n`, or evaluates the rest in a Subset: its author knows."""
    rests = (b for b in info.script.all(ast.BinOp) if isinstance(b.op, ast.Mod))
    if any(info.script.call_name(rest.left) == "len" for rest in rests):
        return True
    return any(
        isinstance(given, ast.Call) and info.script.call_name(given) == "range"
        for call in info.script.calls_of("torch.utils.data.Subset")
        for given in call.args
    )


@rule("INS205", Severity.WARNING, "DistributedSampler shuffles the evaluation data.")
def _shuffled_evaluation(info: ScriptInfo) -> Iterator[Hit]:
    """DistributedSampler shuffles unless it is told not to (a plain DataLoader does not).
    Which samples are repeated as padding, and in which batch a sample is normalised, is then
    drawn by its seed: from N = 2 on, the metric depends on it. If the script calls
    `set_epoch`, that changes from epoch to epoch: two evaluations of one model differ.

    ## Bad
    ```python
    import instep
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(test_set, drop_last=True)
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(test_set, drop_last=True, shuffle=False)
    ```
    """
    for sampler in info.samplers:
        shuffle = keyword(sampler, "shuffle", 3)
        if info.is_for_evaluation(sampler) and (shuffle is None or constant(shuffle) is True):
            text = info.script.source(sampler)
            mended = text.replace("shuffle=True", "shuffle=False")
            varies = (
                "differs from epoch to epoch"
                if _sets_epoch(info, sampler)
                else "depends on the seed"
            )
            yield Hit(
                sampler,
                "the evaluation data is shuffled (the default of DistributedSampler)",
                f"from N = 2 on, the padding {varies}, and the metric with it",
                mended if mended != text else f"{text[:-1]}, shuffle=False)",
            )


def _sets_epoch(info: ScriptInfo, sampler: ast.Call) -> bool:
    """Whether the script calls set_epoch on this sampler, or on that of its loader."""
    for call in info.script.calls_named("set_epoch"):
        owner = info.script.owner(call)
        loader = info.loader_of(owner.value) if isinstance(owner, ast.Attribute) else None
        of_loader = info.sampler_of(loader) if loader is not None else None
        if sampler is of_loader or sampler in info.origins.calls(owner):
            return True
    return False


@rule("INS206", Severity.WARNING, "Every rank evaluates the whole evaluation set.")
def _evaluation_on_every_rank(info: ScriptInfo) -> Iterator[Hit]:
    """The training data is divided among the ranks, the evaluation data is not: each of the
    N processes evaluates all of it. The metric is right, but N - 1 of the evaluations are
    redundant, and the time of an epoch stops falling with N.

    ## Bad
    ```python
    from torch.utils.data import DataLoader, DistributedSampler

    train_loader = DataLoader(train_set, sampler=DistributedSampler(train_set))
    val_loader = DataLoader(val_set, batch_size=64)
    for x, y in val_loader:
        evaluate(x, y)
    ```

    ## Good
    ```python
    import instep
    from torch.utils.data import DataLoader, DistributedSampler

    train_loader = DataLoader(train_set, sampler=DistributedSampler(train_set))
    val_loader = instep.shard(DataLoader(val_set, batch_size=64))
    for x, y in val_loader:
        evaluate(x, y)
    ```
    """
    if not any(info.sampler_of(loader) for loader in info.loaders):
        return
    for loader in info.loaders:
        if not info.is_for_evaluation(loader) or not info.processes.runs_on_ranks(loader):
            continue
        given = [keyword(loader, "sampler", 3), keyword(loader, "batch_sampler", 4)]
        if any(given) or info.guards.effective_guard(loader) or info.has_shard_call(loader):
            continue
        if _is_iterated_on_every_rank(info, loader):
            yield Hit(
                loader,
                "this loader has no sampler: every rank evaluates the whole set",
                "with N processes the evaluation is done N times",
                f"{info.target_names(loader) or 'loader'} = "
                f"instep.shard({info.script.source(loader)})",
            )


def _is_iterated_on_every_rank(info: ScriptInfo, loader: ast.Call) -> bool:
    """Some loop over it is not under a test of the rank."""
    loops: list[ast.AST] = [
        loop
        for loop in info.script.all(ast.For)
        if info.loader_of(info.loop_source(loop)) is loader
    ]
    classes = {made.name for made in info.script.all(ast.ClassDef)}
    loops += [  # a prefetcher of the script's own
        call
        for call in info.script.all(ast.Call)
        if info.script.call_name(call) in classes
        and call.args
        and info.loader_of(call.args[0]) is loader
    ]
    return bool(loops) and not any(_is_guarded(info, loop, loader) for loop in loops)


def _is_guarded(info: ScriptInfo, loop: ast.AST, loader: ast.Call) -> bool:
    if info.guards.effective_guard(loop):
        return True
    function = info.script.function_of(loop)
    calls = info.origins.calls_of(function) if function else []
    names = set(info.target_names(loader).split())
    uses = [c for c in calls if names & {info.script.source(a) for a in c.args}]
    return bool(uses) and all(info.guards.effective_guard(call) for call in uses)


@rule(
    "INS207",
    Severity.ERROR,
    "The evaluation is divided among the ranks, and its results are never reduced.",
)
def _evaluation_never_reduced(info: ScriptInfo) -> Iterator[Hit]:
    """Each rank evaluates its own part of the data, and nothing in the script sums or
    gathers the results. The printed metric, which also selects the best checkpoint, is that
    of one N-th of the data, and each rank may select another checkpoint.

    ## Bad
    ```python
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(test_set, shuffle=False, drop_last=True)
    for x, y in DataLoader(test_set, sampler=sampler):
        correct += (model(x).argmax(1) == y).sum()
    ```

    ## Good
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(test_set, shuffle=False, drop_last=True)
    for x, y in DataLoader(test_set, sampler=sampler):
        correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    ```
    """
    imported = {name.split(".")[-1] for name in info.script.imported_modules}
    if info.reduction_calls or imported & {"MetricLogger", "torchmetrics", "instep", "accelerate"}:
        return
    if any(
        name.startswith(".") or re.match(r"(?!torch\b).*(util|metric)", name)
        for name in info.script.imported_modules
    ):
        return  # the reduction may stand in a file that is not read here
    for loop in info.script.all(ast.For):
        loader = info.loader_of(info.loop_source(loop))
        sampler = info.sampler_of(loader) if loader else None
        if sampler is None or loader is None or not _accumulates(info, loop):
            continue
        if info.is_for_evaluation(sampler) or is_evaluation_text(info.target_names(loader)):
            yield Hit(
                loop,
                "each rank evaluates its own part, and no reduction follows",
                "with N processes the metric is that of 1/N of the data, and differs by rank",
                "dist.all_reduce(counts)  # a tensor with the sums and the number of samples",
            )


def _accumulates(info: ScriptInfo, loop: ast.For) -> bool:
    """Whether the loop accumulates: `correct += …` or `meter.update(…)`."""
    return any(
        isinstance(inner, ast.AugAssign)
        or (isinstance(inner, ast.Call) and info.script.call_name(inner) == "update")
        for inner in ast.walk(loop)
    )


@rule(
    "INS208",
    Severity.ERROR,
    "`correct[:k].view(-1)` of a transposed comparison raises.",
    RuleScope.ANY,
)
def _view_of_transposed(info: ScriptInfo) -> Iterator[Hit]:
    """The top-k accuracy of many scripts compares a transposed prediction and flattens some
    rows with `view(-1)`. Since PyTorch 1.7 the comparison keeps the transposed strides, and
    `view` raises "view size is not compatible", at any N, for k > 1.

    ## Bad
    ```python
    import torch.distributed as dist

    def accuracy(output, target, k):
        pred = output.topk(k, 1)[1].t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return correct[:k].view(-1).float().sum(0)
    ```

    ## Good
    ```python
    import torch.distributed as dist

    def accuracy(output, target, k):
        pred = output.topk(k, 1)[1].t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return correct[:k].reshape(-1).float().sum(0)
    ```
    """
    for call in info.script.calls_named("view"):
        rows = info.script.owner(call)
        if not isinstance(rows, ast.Subscript) or not isinstance(rows.slice, ast.Slice):
            continue
        compared = [c for c in info.origins.calls(rows.value) if info.script.call_name(c) == "eq"]
        for comparison in compared:
            predicted = info.origins.calls(info.script.owner(comparison))
            if any(info.script.call_name(c) == "t" for c in predicted):
                text = info.script.source(call)
                yield Hit(
                    call,
                    f"{text} flattens rows of a transposed comparison",
                    "at any N: RuntimeError on PyTorch 1.7 and later when k > 1",
                    text.replace(".view(", ".reshape("),
                )
                break
