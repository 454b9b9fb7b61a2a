"""INS301, INS305, INS306, INS308, INS311: which samples a rank gets, and the model's input."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo, split_words

WORKER_FLAGS = {"workers", "num_workers", "n_workers", "nworkers", "num_worker", "data_workers"}
_COMBINED_BY = (
    "replicate", "DistributedOptimizer", "FullyShardedDataParallel", "FSDP", "fully_shard",
    "prepare", "initialize",
)  # fmt: skip
"""What brings the ranks' gradients together, beside DistributedDataParallel and reductions."""


@rule("INS301", Severity.ERROR, "set_epoch is never called on a shuffling DistributedSampler.")
def _set_epoch_forgotten(info: ScriptInfo) -> Iterator[Hit]:
    """DistributedSampler shuffles with seed + epoch, and the epoch stays 0 unless
    `set_epoch` is called. Without it every epoch has the same order, and each rank sees the
    same samples in the same batches for the whole training, at any N.

    ## Bad
    ```python
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(train_set, sampler=DistributedSampler(train_set))
    for epoch in range(90):
        for batch in loader:
            step(batch)
    ```

    ## Good
    ```python
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(train_set, sampler=DistributedSampler(train_set))
    for epoch in range(90):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            step(batch)
    ```
    """
    set_on = [info.script.dotted_name(c.func) for c in info.script.calls_named("set_epoch")]
    if not all(re.match(r"(val|test|eval)", name) for name in set_on):
        return
    if "accelerate" in info.script.imported_roots:
        return
    for sampler in info.samplers:
        shuffle = keyword(sampler, "shuffle", 3)
        if constant(shuffle) is False or info.is_for_evaluation(sampler):
            continue
        if _is_passed_to_another_file(info, sampler):
            continue
        loop = _epochs(info, sampler)
        if loop is not None:
            name = info.target_names(sampler) or "loader.sampler"
            yield Hit(
                sampler,
                "this sampler shuffles, and set_epoch is never called",
                "at any N, every epoch has the same order of samples",
                f"{name}.set_epoch(epoch)  # first line of the loop over epochs",
            )


def _is_passed_to_another_file(info: ScriptInfo, sampler: ast.Call) -> bool:
    """`train(model, loader, sampler)`, where train is imported and may set the epoch."""
    names = set(info.target_names(sampler).split())
    return any(
        names & {info.script.source(v) for v in (*call.args, *(k.value for k in call.keywords))}
        for call in info.script.all(ast.Call)
        if not info.called_functions(call)
        and not info.script.full_name(call).startswith(("torch.utils.data.", "builtins"))
        and not info.script.call_name(call).endswith(("Loader", "Sampler"))
        and info.script.call_name(call) not in {"len", "print", "isinstance", "iter"}
    )


def _epochs(info: ScriptInfo, sampler: ast.Call) -> ast.For | ast.While | None:
    """The loop over epochs, if it can be seen that there is one, and that the sampler lives
    longer than one epoch."""
    if any(
        "epoch" in info.script.source(_head(loop)) for loop in info.script.parent_loops(sampler)
    ):
        return None
    loops: list[ast.For | ast.While] = [*info.script.all(ast.For), *info.script.all(ast.While)]
    return next((loop for loop in loops if "epoch" in info.script.source(_head(loop))), None)


def _head(loop: ast.For | ast.While) -> ast.expr:
    return ast.Tuple([loop.target, loop.iter]) if isinstance(loop, ast.For) else loop.test


@rule(
    "INS305",
    Severity.ERROR,
    "Images are normalised twice, in the transforms and in a prefetcher.",
)
def _normalised_twice(info: ScriptInfo) -> Iterator[Hit]:
    """`ToTensor()` and `Normalize()` give values around zero. A prefetcher that subtracts
    `255 * mean` and divides by `255 * std` was written for raw bytes: after it, the input is
    almost a constant, at any N. The loss falls a little, and the cause is hard to see.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist
    from torchvision import transforms

    to_input = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])

    class Prefetcher:
        def __init__(self, loader):
            self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255])

        def preload(self):
            self.input = self.input.float().sub_(self.mean)
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist
    from torchvision import transforms

    to_input = transforms.PILToTensor()

    class Prefetcher:
        def __init__(self, loader):
            self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255])

        def preload(self):
            self.input = self.input.float().sub_(self.mean)
    ```
    """
    if not {"ToTensor", "Normalize"} <= info.transforms:
        return
    for call in info.script.calls_named("sub_", "sub"):
        mean = call.args[0] if call.args else None
        if (
            mean is not None
            and "mean" in info.script.source(mean)
            and "255" in info.origins.text(mean)
        ):
            yield Hit(
                call,
                "the mean (times 255) is subtracted from images that ToTensor and Normalize "
                "have normalised",
                "at any N, the model sees an almost constant input",
                "transforms.PILToTensor()  # instead of ToTensor() and Normalize(...)",
            )


@rule(
    "INS306",
    Severity.WARNING,
    "The option for the number of data workers is parsed and not used.",
    RuleScope.PARALLEL,
)
def _workers_flag_ignored(info: ScriptInfo) -> Iterator[Hit]:
    """The command line offers a number of workers, and the DataLoader has a constant. The
    user who raises it because N processes wait for data sees no change.

    ## Bad
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    parser.add_argument("-j", "--workers", type=int, default=4)
    args = parser.parse_args()
    loader = DataLoader(data, num_workers=2)
    ```

    ## Good
    ```python
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    parser.add_argument("-j", "--workers", type=int, default=4)
    args = parser.parse_args()
    loader = DataLoader(data, num_workers=args.workers)
    ```
    """
    flag = next((name for name in info.origins.options if name in WORKER_FLAGS), None)
    if flag is None or any(read.attr == flag for read in info.script.all(ast.Attribute)):
        return
    if any(
        call.func.id == "vars"
        for call in info.script.all(ast.Call)
        if isinstance(call.func, ast.Name)
    ):
        return
    for loader in info.loaders:
        number = keyword(loader, "num_workers", 5)
        if isinstance(constant(number), int):
            yield Hit(
                loader,
                f"num_workers={constant(number)} is fixed; --{flag.replace('_', '-')} is ignored",
                "at any N, the option has no effect",
                f"num_workers=args.{flag}",
            )


@rule("INS308", Severity.WARNING, "Every rank trains on all of the training data.")
def _training_data_not_divided(info: ScriptInfo) -> Iterator[Hit]:
    """DistributedDataParallel and `instep.replicate` bring gradients together, and divide no data.
    Without a DistributedSampler, or `instep.shard(loader)`, each of the N processes goes through
    the whole data set: an epoch takes as many steps as with one process. With one seed all ranks
    compute the same gradient, and N - 1 of them for nothing; with different seeds an epoch is N
    epochs.

    ## Bad
    ```python
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    train_set = TensorDataset(inputs, labels)
    model = DistributedDataParallel(net)
    for x, y in DataLoader(train_set, batch_size=64, shuffle=True):
        loss_function(model(x), y).backward()
    ```

    ## Good
    ```python
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    train_set = TensorDataset(inputs, labels)
    model = DistributedDataParallel(net)
    for x, y in DataLoader(train_set, batch_size=64, sampler=DistributedSampler(train_set)):
        loss_function(model(x), y).backward()
    ```
    """
    for loop in info.training_loops:
        calls = info.script.calls_inside(loop)
        loader = info.loader_of(info.loop_source(loop)) if isinstance(loop, ast.For) else None
        trains_replica = any(is_replicated(info, call.func) for call in calls)
        if any(info.script.full_name(call) == "instep.shard" for call in calls):
            continue  # of each batch
        if loader is None or not (trains_replica or any(info.ddp_call_of(c.func) for c in calls)):
            continue
        dataset = keyword(loader, "dataset", 0)
        if dataset is None or _chooses_samples(loader) or info.has_shard_call(loader):
            continue
        if info.processes.runs_on_ranks(loop) and _is_the_same_on_all_ranks(info, dataset):
            name = info.script.source(dataset)
            if trains_replica:
                yield Hit(
                    loader,
                    "this loader is not in instep.shard, and trains a replicated model",
                    "with N processes every rank computes the whole of each batch",
                    f"instep.shard({info.script.source(loader)})",
                )
                continue
            yield Hit(
                loader,
                "this loader has no DistributedSampler, and trains a DistributedDataParallel model",
                "with N processes each sample of an epoch is trained on N times",
                f"DataLoader({name}, sampler=DistributedSampler({name}), ...)  # without shuffle",
            )


def is_replicated(info: ScriptInfo, node: ast.expr) -> bool:
    """Whether instep.replicate was called with a value, or returns it."""
    calls = [*info.script.calls_of("instep.replicate")]
    own = {info.script.source(call.args[0]) for call in calls if call.args}
    return info.script.source(node) in own or any(
        call in calls for call in info.origins.calls(node)
    )


def _chooses_samples(loader: ast.Call) -> bool:
    """Whether a loader is given anything that may choose its samples."""
    given = [keyword(loader, "sampler", 3), keyword(loader, "batch_sampler", 4)]
    unknown = [k for k in loader.keywords if k.arg is None]
    return any(given) or bool(unknown) or any(isinstance(a, ast.Starred) for a in loader.args)


def _is_the_same_on_all_ranks(info: ScriptInfo, dataset: ast.expr) -> bool:
    """Whether it can be seen that a data set has all samples on every rank."""
    origins = info.origins.of(dataset)
    return bool(origins) and all(_has_all_samples(info, origin) for origin in origins)


def _has_all_samples(info: ScriptInfo, made: ast.expr) -> bool:
    if not isinstance(made, ast.Call) or info.ranks.depends_on_rank(made):
        return False
    full, word = info.script.full_name(made), info.script.call_name(made)
    if full:
        return full.startswith(("torchvision.datasets.", "torch.utils.data.TensorDataset"))
    return any(
        {info.script.full_name(base) for base in own.bases} == {"torch.utils.data.Dataset"}
        and not {"rank", "world", "shard"} & split_words(info.script.source(own))
        for own in info.script.all(ast.ClassDef)
        if own.name == word
    )


@rule("INS311", Severity.ERROR, "Rows are divided by hand, and each rank trains on its own.")
def _divided_by_hand(info: ScriptInfo) -> Iterator[Hit]:
    """`x[rank::world_size]` hands each rank its rows. Nothing brings the gradients of these rows
    together: from N = 2 on, each rank trains a model of its own on 1/N of the data, and these N
    models drift apart. `instep.shard` divides the batch, and `instep.replicate` sums the gradients.

    ## Bad
    ```python
    import instep

    for x, y in batches:
        x, y = x[instep.rank :: instep.world_size], y[instep.rank :: instep.world_size]
        loss_function(model(x), y).backward()
        optimizer.step()
    ```

    ## Good
    ```python
    import instep

    model = instep.replicate(model)
    for batch in batches:
        x, y = instep.shard(batch)
        loss_function(model(x), y).backward()
        optimizer.step()
    ```
    """
    if info.ddp_calls or info.reduction_calls or info.collectives or not info.backward_calls:
        return
    if any(info.script.calls_named(*_COMBINED_BY)):
        return
    for part in info.script.all(ast.Subscript):
        if _takes_rows_of_rank(info, part.slice):
            yield Hit(
                part,
                f"{info.script.source(part)} are this rank's rows, and nothing sums the gradients",
                "with N processes there are N models, each of 1/N of the data",
                "model = instep.replicate(model)  # before the loop\n"
                f"instep.shard({info.script.source(part.value)})  # this rank's rows",
            )


def _takes_rows_of_rank(info: ScriptInfo, taken: ast.expr) -> bool:
    """Whether it is `rank::world_size`, or from one bound to another that depend on the rank."""
    taken = taken.elts[0] if isinstance(taken, ast.Tuple) and taken.elts else taken
    if not isinstance(taken, ast.Slice):
        return False
    if info.ranks.is_world_size(taken.step):
        return info.ranks.rank_type(taken.lower) == "rank"
    bounds = taken.lower, taken.upper
    return taken.step is None and all(
        bound is not None and info.ranks.depends_on_rank(bound) for bound in bounds
    )
