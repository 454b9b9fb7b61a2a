"""INS310: a part of DistributedDataParallel in a script with the two lines of instep."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.rules.data import is_replicated
from instep.check.script import keyword
from instep.check.script_info import ScriptInfo

_VALUES = [f"instep.{name}" for name in ("rank", "local_rank", "world_size", "is_main_process")]


@rule("INS310", Severity.ERROR, "A part of DistributedDataParallel is left in a script for instep.")
def _leftover_of_ddp(info: ScriptInfo) -> Iterator[Hit]:
    """In place of DistributedDataParallel and DistributedSampler a script for instep has
    `instep.replicate(model)` and `instep.shard(loader)`. A DistributedSampler that stays gives each
    rank batches of its own: `instep.shard` refuses to divide them again, and without it the batch
    of the job is N times that of one process, with 1/N of the steps. `model.module` is an
    AttributeError, since `replicate` returns the model itself and no wrapper; so is `set_epoch`,
    which nothing needs. `instep.rank()` is a TypeError: `instep.rank` is a number.

    ## Bad
    ```python
    import instep
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    model = instep.replicate(net)
    sampler = DistributedSampler(train_set)
    for epoch in range(90):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train_set, batch_size=64, sampler=sampler):
            loss_function(model(x), y).backward()
    ```

    ## Good
    ```python
    import instep
    import torch
    from torch.utils.data import DataLoader

    model = instep.replicate(net)
    loader = instep.shard(DataLoader(train_set, batch_size=64, shuffle=True))
    for epoch in range(90):
        for x, y in loader:
            loss_function(model(x), y).backward()
    ```
    """
    replicas = [*info.script.calls_of("instep.replicate")]
    shards = [*info.script.calls_of("instep.shard")]
    for loader in info.loaders if replicas and not info.ddp_calls else ():
        if info.sampler_of(loader) is not None:
            given = [keyword(each, "what", 0) for each in shards]
            is_sharded = any(loader in info.origins.calls(each) for each in given)
            yield Hit(
                loader,
                "this loader has a DistributedSampler, and instep.shard divides its batches again"
                if is_sharded
                else "this loader has a DistributedSampler in place of instep.shard",
                "from N = 2 on, instep.shard refuses it"
                if is_sharded
                else "with N processes the batch of the job is N times that of one process",
                "instep.shard(DataLoader(dataset, batch_size, shuffle=True))",
            )
    yield from _wrapped_replicas(info, replicas)
    for call in info.script.calls_of(*_VALUES):
        value = info.script.source(call.func)
        yield Hit(call, f"{value} is no function", "at any N, a TypeError", value)
    for asked in info.script.all(ast.Attribute):
        own, name = info.script.source(asked.value), asked.attr
        sharded = name == "set_epoch" and any(c in shards for c in info.origins.calls(asked.value))
        if not sharded and not (name == "module" and is_replicated(info, asked.value)):
            continue
        if name == "module" and info.ddp_call_of(asked.value) is not None:
            continue
        if not _may_be_missing(info, asked):
            yield Hit(
                asked,
                f"{own} has no attribute {name}",
                "at any N, an AttributeError",
                "# delete it: each epoch has an order of its own" if sharded else own,
            )


def _wrapped_replicas(info: ScriptInfo, replicas: list[ast.Call]) -> Iterator[Hit]:
    """DistributedDataParallel around what instep.replicate returns."""
    for wrapper in info.ddp_calls:
        made = info.origins.calls(wrapper.args[0]) if wrapper.args else []
        if any(c in replicas and not info.script.are_exclusive(c, wrapper) for c in made):
            yield Hit(
                wrapper,
                f"{info.script.source(wrapper.func)} wraps what instep.replicate returns",
                "from N = 2 on, the gradients are sent twice; at N = 1 there is no process group",
                info.script.source(wrapper.args[0]),
            )


def _may_be_missing(info: ScriptInfo, asked: ast.Attribute) -> bool:
    """Whether a script looks first whether there is such an attribute, or defines it itself."""
    defined = any(
        isinstance(each.ctx, ast.Store) and each.attr == asked.attr
        for each in info.script.all(ast.Attribute)
    )
    return defined or any(
        isinstance(above, ast.Try)
        or (
            isinstance(above, ast.If | ast.IfExp)
            and any(
                info.script.call_name(each) in {"hasattr", "isinstance"}
                for each in ast.walk(above.test)
            )
        )
        for above in info.script.ancestors(asked)
    )
