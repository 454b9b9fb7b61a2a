"""INS401 to INS403, INS405: learning rates, batch sizes, batch normalisation, wrappers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.rules import counting
from instep.check.script import constant, keyword
from instep.check.script_info import ScriptInfo, split_words

SMALL_BATCH = 16
"""Below this many samples per rank the statistics of BatchNorm are visibly noisier."""


@rule(
    "INS401",
    Severity.ERROR,
    "A learning rate or a batch is scaled by the number of processes once too often.",
)
def _scaled_twice(info: ScriptInfo) -> Iterator[Hit]:
    """The linear rule multiplies the learning rate by N because the batch grew N times. Done
    in two places it grows N² times (16 times with N = 4). With `instep.shard` the batch does
    not grow at all, and any scaling is one too many, also a batch size or a number of steps that
    is divided by N.

    ## Bad
    ```python
    import horovod.torch as hvd
    import torch

    args.lr *= hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size())
    ```

    ## Good
    ```python
    import horovod.torch as hvd
    import torch

    args.lr *= hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    ```
    """
    scalings = list(_scalings(info))
    global_batch = any(info.script.calls_of("instep.shard", "instep.replicate"))
    for place, name, _ in scalings:
        first = next(
            (
                other
                for other, _, target in scalings
                if other is not place
                and target == name
                and other.lineno < place.lineno
                and not info.script.are_exclusive(other, place)
            ),
            None,
        )
        if first is None and not global_batch:
            continue
        why = f"already in line {first.lineno}" if first else "though instep keeps the batch global"
        yield Hit(
            place,
            f"{name} is multiplied by the number of processes, {why}",
            "with N processes the learning rate is N times too large",
            f"{name}  # without the factor",
        )
    for share in info.script.all(ast.BinOp):
        if _is_share_of_steps(info, share):
            yield Hit(
                share,
                f"{info.script.source(share.left)} is the number of steps of every rank already",
                "with N processes a schedule by this number ends after 1/N of the steps",
                info.script.source(share.left),
            )
    for loader in info.loaders if any(info.script.calls_of("instep.shard")) else ():
        given = keyword(loader, "batch_size", 1)
        quotient = next(_quotients(info, given), None) if info.has_shard_call(loader) else None
        if quotient is not None:
            yield Hit(
                quotient,
                f"{info.script.source(quotient)} is divided among the ranks once more by "
                "instep.shard",
                "with N processes the batch of the whole job is 1/N of that of one process",
                info.script.source(quotient.left),
            )


def _is_share_of_steps(info: ScriptInfo, quotient: ast.BinOp) -> bool:
    """Whether this is `len(loader) // world_size` of a loader that instep.shard divides."""
    match quotient:
        case ast.BinOp(ast.Call(ast.Name("len"), [of]), ast.Div() | ast.FloorDiv(), size):
            return info.ranks.is_world_size(size) and counting.sharded_loader(info, of) is not None
    return False


def _quotients(info: ScriptInfo, size: ast.expr | None) -> Iterator[ast.BinOp]:
    """`batch_size // world_size`, where a value is made."""
    for origin in info.origins.of(size):
        for inner in ast.walk(origin):
            if not isinstance(inner, ast.BinOp) or not info.ranks.is_world_size(inner.right):
                continue
            if isinstance(inner.op, ast.Div | ast.FloorDiv):
                yield inner


def _scalings(info: ScriptInfo) -> Iterator[tuple[ast.BinOp | ast.AugAssign, str, str]]:
    """Each `lr * world_size`: the place, the rate that is scaled, the name that gets it."""
    for changed in info.script.all(ast.AugAssign):
        name = info.script.dotted_name(changed.target)
        is_scaled = isinstance(changed.op, ast.Mult) and info.ranks.has_world_size(changed.value)
        if is_scaled and _is_rate(name):
            yield changed, name, name
    for product in info.script.all(ast.BinOp):
        if not isinstance(product.op, ast.Mult):
            continue
        for rate, factor in ((product.left, product.right), (product.right, product.left)):
            name = info.script.dotted_name(rate)
            above = info.script.parent(product)
            given = isinstance(above, ast.keyword) and above.arg == "lr"
            target = _target(info, product)
            is_rate = given or _is_rate(name) or (_is_rate(target) and constant(rate) is not None)
            if is_rate and info.ranks.is_world_size(factor):
                yield product, name or info.script.source(rate), target


def _target(info: ScriptInfo, product: ast.BinOp) -> str:
    statement = info.script.statement_of(product)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return info.script.dotted_name(statement.targets[0])
    return ""


def _is_rate(name: str) -> bool:
    return bool(split_words(name.split(".")[-1]) & {"lr"}) or name.endswith("learning_rate")


@rule("INS402", Severity.WARNING, "BatchNorm sees only a small batch per rank.")
def _local_batch_norm(info: ScriptInfo) -> Iterator[Hit]:
    """DistributedDataParallel leaves BatchNorm local: mean and variance come from this
    rank's samples. With fewer than 16 of them the statistics are noisy, and the result
    depends on how the same batch is divided; from N = 2 on it is another training than in
    one process.

    ## Bad
    ```python
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    loader = DataLoader(data, batch_size=4)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    model = DistributedDataParallel(net)
    ```

    ## Good
    ```python
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    loader = DataLoader(data, batch_size=4)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DistributedDataParallel(net)
    ```
    """
    text = " ".join(info.script.imports.values()) + " ".join(
        info.script.dotted_name(c.func) for c in info.script.all(ast.Call)
    )
    if re.search(r"sync_?b", text, re.IGNORECASE) or not info.has_batch_norm:
        return
    small = next((n for loader in info.loaders if (n := _small_batch(info, loader))), None)
    for wrap in info.ddp_calls if small else []:
        model = info.script.source(wrap.args[0]) if wrap.args else "model"
        yield Hit(
            wrap,
            f"BatchNorm stays local, with {small} samples per rank",
            "from N = 2 on, its statistics come from one rank's few samples",
            f"{model} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({model})",
        )


def _small_batch(info: ScriptInfo, loader: ast.Call) -> int | None:
    size = keyword(loader, "batch_size", 1)
    if info.is_for_evaluation(loader) or isinstance(size, ast.BinOp):
        return None
    values = {constant(origin) for origin in info.origins.of(size)}
    for option in info.origins.calls(size):
        if info.script.call_name(option) == "add_argument":
            values.add(constant(keyword(option, "default")))
    values.discard(None)
    if len(values) == 1 and isinstance(number := values.pop(), int) and 1 < number < SMALL_BATCH:
        return number
    return None


@rule("INS403", Severity.WARNING, "find_unused_parameters=True where every parameter is used.")
def _nothing_unused(info: ScriptInfo) -> Iterator[Hit]:
    """With `find_unused_parameters=True` DistributedDataParallel walks the whole graph after
    each forward, and delays the reduction. In the model that is wrapped here every
    parameter is visibly used. It costs time at any N, and gives nothing.

    ## Bad
    ```python
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    ```

    ## Good
    ```python
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = DistributedDataParallel(net)
    ```
    """
    for wrap in info.ddp_calls:
        if constant(keyword(wrap, "find_unused_parameters")) is not True or not wrap.args:
            continue
        models = [m for m in info.origins.of(wrap.args[0]) if m is not wrap]
        if models and all(_uses_every_parameter(info, model) for model in models):
            text = info.script.source(wrap)
            yield Hit(
                wrap,
                "every parameter of this model is used in its forward",
                "at any N, the search for unused parameters costs time in each step",
                text.replace(", find_unused_parameters=True", ""),
            )


def _uses_every_parameter(info: ScriptInfo, model: ast.expr) -> bool:
    """A chain of torch.nn layers, a torchvision classifier, or a module moved to a device."""
    if not isinstance(model, ast.Call):
        return False
    if isinstance(model.func, ast.Attribute) and model.func.attr in {"to", "cuda"}:
        inner = [o for o in info.origins.of(model.func.value) if o is not model]
        return bool(inner) and all(_uses_every_parameter(info, one) for one in inner)
    full = info.script.full_name(model)
    if full == "torch.nn.Sequential":
        layers = [info.script.full_name(argument) for argument in model.args]
        return all(layer.startswith("torch.nn.") for layer in layers)
    return full == "torch.nn.Linear" or bool(
        re.match(r"torchvision\.models\.(resnet|vgg|alexnet|densenet|mobilenet)\w*$", full)
    )


@rule("INS405", Severity.WARNING, "The batch size is divided by the devices of one node.")
def _batch_over_device_count(info: ScriptInfo) -> Iterator[Hit]:
    """`torch.cuda.device_count()` counts the devices that this process sees, not the
    processes of the job. On two nodes the batch is twice what was asked for; with
    `srun --gpus-per-task=1` every process sees one device and takes the whole batch.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    batch_size = args.batch_size // torch.cuda.device_count()
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    batch_size = args.batch_size // dist.get_world_size()
    ```
    """
    if info.processes.spawn is not None and not info.expects_several_nodes:
        return
    sizes = {info.script.source(size) for call in info.script.calls_named("init_process_group")
             if (size := keyword(call, "world_size", 3)) is not None}  # fmt: skip
    for divided in info.script.all(ast.BinOp):
        if not isinstance(divided.op, ast.Div | ast.FloorDiv):
            continue
        if info.script.source(divided.right) in sizes:
            continue
        if not _is_batch(info, divided.left) or not info.is_device_count(divided.right):
            continue
        if info.processes.runs_on_ranks(divided):
            batch = info.script.source(divided.left)
            yield Hit(
                divided,
                f"{info.script.source(divided)} divides by the devices that this process sees",
                *(("on k devices the batch of the job is 1/k of what was asked for", batch)
                  if any(info.script.calls_of("instep.shard"))
                  else ("on k nodes the batch of the job is k times as large",
                        f"{batch} // {info.ranks.world_size}")),
            )  # fmt: skip


def _is_batch(info: ScriptInfo, node: ast.expr) -> bool:
    last = info.script.dotted_name(node).split(".")[-1].lower()
    return "batch" in last and "num" not in last
