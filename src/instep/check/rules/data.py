"""INS301, INS305, INS306: the order of samples, and what reaches the model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.facts import Facts
from instep.check.finding import Hit, Scope, Severity, rule
from instep.check.script import constant, keyword

WORKER_FLAGS = {"workers", "num_workers", "n_workers", "nworkers", "num_worker", "data_workers"}


@rule(
    "INS301",
    "set-epoch-forgotten",
    Severity.ERROR,
    "A shuffling DistributedSampler is never told the epoch.",
)
def set_epoch_forgotten(facts: Facts) -> Iterator[Hit]:
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
    told = list(facts.script.calls_named("set_epoch"))
    imported = {name.split(".")[0] for name in facts.script.imported_modules}
    if any(not _about_evaluation(facts, call) for call in told) or "accelerate" in imported:
        return
    for sampler in facts.samplers:
        shuffle = keyword(sampler, "shuffle", 3)
        if constant(shuffle) is False or facts.for_evaluation(sampler):
            continue
        if _handed_to_another_file(facts, sampler):
            continue
        loop = _epochs(facts, sampler)
        if loop is not None:
            name = facts.names_of(sampler) or "loader.sampler"
            yield Hit(
                sampler,
                "this sampler shuffles, and set_epoch is never called",
                "at any N, every epoch has the same order of samples",
                f"{name}.set_epoch(epoch)  # first line of the loop over epochs",
            )


def _about_evaluation(facts: Facts, call: ast.Call) -> bool:
    return bool(re.match(r"(val|test|eval)", facts.script.dotted(call.func)))


def _handed_to_another_file(facts: Facts, sampler: ast.Call) -> bool:
    """`train(model, loader, sampler)`, where train is imported and may set the epoch."""
    names = set(facts.names_of(sampler).split())
    return any(
        names & {facts.script.source(v) for v in (*call.args, *(k.value for k in call.keywords))}
        for call in facts.script.all(ast.Call)
        if not facts.local_functions(call)
        and not facts.script.full_name(call).startswith(("torch.utils.data.", "builtins"))
        and not facts.script.called(call).endswith(("Loader", "Sampler"))
        and facts.script.called(call) not in {"len", "print", "isinstance", "iter"}
    )


def _epochs(facts: Facts, sampler: ast.Call) -> ast.For | ast.While | None:
    """The loop over epochs, if it can be seen that there is one, and that the sampler lives
    longer than one epoch."""
    if any(
        "epoch" in facts.script.source(_head(loop)) for loop in facts.script.loops_around(sampler)
    ):
        return None
    loops: list[ast.For | ast.While] = [*facts.script.all(ast.For), *facts.script.all(ast.While)]
    return next((loop for loop in loops if "epoch" in facts.script.source(_head(loop))), None)


def _head(loop: ast.For | ast.While) -> ast.expr:
    return ast.Tuple([loop.target, loop.iter]) if isinstance(loop, ast.For) else loop.test


@rule(
    "INS305",
    "normalised-twice",
    Severity.ERROR,
    "Images are normalised in the transforms and once more in a prefetcher.",
)
def normalised_twice(facts: Facts) -> Iterator[Hit]:
    """`ToTensor()` and `Normalize()` give values around zero. A prefetcher that subtracts
    `255 * mean` and divides by `255 * std` was written for raw bytes: after it, the input is
    almost a constant, at any N. The loss falls a little and nobody sees why.

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
    made = {
        facts.script.full_name(c).split(".")[-1]
        for c in facts.script.all(ast.Call)
        if facts.script.full_name(c).startswith("torchvision.transforms")
    }
    if not {"ToTensor", "Normalize"} <= made:
        return
    for call in facts.script.calls_named("sub_", "sub"):
        mean = call.args[0] if call.args else None
        if (
            mean is not None
            and "mean" in facts.script.source(mean)
            and "255" in facts.origins.text(mean)
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
    "workers-flag-ignored",
    Severity.WARNING,
    "The option for the number of data workers is parsed and not used.",
    Scope.PARALLEL,
)
def workers_flag_ignored(facts: Facts) -> Iterator[Hit]:
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
    flag = next((name for name in facts.origins.options if name in WORKER_FLAGS), None)
    if flag is None or any(read.attr == flag for read in facts.script.all(ast.Attribute)):
        return
    if any(
        call.func.id == "vars"
        for call in facts.script.all(ast.Call)
        if isinstance(call.func, ast.Name)
    ):
        return
    for loader in facts.loaders:
        number = keyword(loader, "num_workers", 5)
        if isinstance(constant(number), int):
            yield Hit(
                loader,
                f"num_workers={constant(number)} is fixed; --{flag.replace('_', '-')} is ignored",
                "at any N, the option has no effect",
                f"num_workers=args.{flag}",
            )
