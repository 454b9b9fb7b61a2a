"""INS302 to INS304 and INS307: seeds, augmentation, determinism."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo
from instep.distributed.identity.accelerators import KINDS

SEEDING = (
    *("torch.manual_seed", "random.seed", "numpy.random.seed"),
    *(f"torch.{kind}.{name}" for kind in KINDS for name in ("manual_seed", "manual_seed_all")),
)


@rule(
    "INS302", Severity.WARNING, "All ranks use the same seed and draw the same random augmentation."
)
def _same_augmentation(info: ScriptInfo) -> Iterator[Hit]:
    """Every rank calls `manual_seed` with one number. The model then starts alike, which is
    wanted; but the workers of every rank are seeded from the same stream, too, so that the
    k-th sample of each rank gets the same crop and the same flip: from N = 2 on, the batch
    has N times fewer different augmentations than with one process.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist
    from torchvision import transforms

    torch.manual_seed(1)
    crop = transforms.RandomCrop(32)
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist
    from torchvision import transforms

    torch.manual_seed(1)
    model = build()
    torch.manual_seed(1 + dist.get_rank())  # after the model is built
    crop = transforms.RandomCrop(32)
    ```
    """
    seeds = [c for c in info.script.calls_of("torch.manual_seed") if c.args]
    if not info.samplers and not info.ddp_calls and not seeds:
        return
    ranked = [c for c in info.script.calls_of(*SEEDING) if _seed_depends_on_rank(info, c)]
    if ranked or not any(name.startswith("Random") for name in info.transforms):
        return
    if _seeds_workers(info) or any(info.script.calls_of("instep.shard")):
        return  # by instep.shard each sample has random numbers of its own
    for call in seeds:
        if info.processes.runs_on_ranks(call) or info.processes.spawn is None:
            text = info.script.source(call)
            yield Hit(
                call,
                "every rank draws from the same seed, and the transforms are random",
                "from N = 2 on, the k-th sample of every rank gets the same augmentation",
                f"{text[:-1]} + {info.ranks.rank})  # again, after the model is built",
            )
            return


def _seed_depends_on_rank(info: ScriptInfo, call: ast.Call) -> bool:
    return any(
        info.ranks.depends_on_rank(argument) and not _takes_rank_off(info, argument)
        for argument in call.args
    )


def _takes_rank_off(info: ScriptInfo, seed: ast.expr) -> bool:
    """`seed - rank`, where the rank was added before."""
    if not isinstance(seed, ast.BinOp) or not isinstance(seed.op, ast.Sub):
        return False
    return info.ranks.rank_type(seed.right) is not None


def _seeds_workers(info: ScriptInfo) -> bool:
    return any(
        keyword(loader, name) is not None
        for loader in info.loaders
        for name in ("worker_init_fn", "generator")
    )


@rule(
    "INS303", Severity.WARNING, "Some random generators that the script draws from are not seeded."
)
def _half_seeded(info: ScriptInfo) -> Iterator[Hit]:
    """The script seeds torch (or `random`) so that a run can be repeated, but draws from
    numpy's global generator, which starts differently in each process: at any N no run can
    be repeated, and with N > 1 the ranks draw other numbers than one process would.

    ## Bad
    ```python
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    order = np.random.permutation(100)
    ```

    ## Good
    ```python
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    np.random.seed(1)
    order = np.random.permutation(100)
    ```
    """
    seeded = list(info.script.calls_of("torch.manual_seed", "random.seed"))
    if not seeded or any(info.script.calls_of("numpy.random.seed")):
        return
    for call in info.script.all(ast.Call):
        full = info.script.full_name(call)
        if full.startswith("numpy.random.") and full.split(".")[-1] not in {
            "RandomState", "default_rng", "SeedSequence", "Generator", "get_state", "set_state",
        }:  # fmt: skip
            seed = info.script.source(seeded[0].args[0]) if seeded[0].args else "seed"
            yield Hit(
                call,
                "numpy's global generator is drawn from, but only others are seeded",
                "at any N, no run can be repeated, and the ranks draw differently",
                f"np.random.seed({seed})",
            )
            return


@rule(
    "INS304",
    Severity.ERROR,
    "Seeds differ by rank before the model is built, and nothing makes it equal again.",
)
def _seed_by_rank_before_model(info: ScriptInfo) -> Iterator[Hit]:
    """With `manual_seed(seed + rank)` every rank builds another model. DistributedDataParallel
    (or `hvd.broadcast_parameters`, or `instep.replicate`) sends rank 0's to all. A script
    that averages gradients by hand does not, nor does `hvd.DistributedOptimizer` by itself:
    from N = 2 on they train N different models.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    torch.manual_seed(1 + dist.get_rank())
    model = torch.nn.Linear(8, 2)
    for p in model.parameters():
        dist.all_reduce(p.grad)
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2)
    torch.manual_seed(1 + dist.get_rank())
    for p in model.parameters():
        dist.all_reduce(p.grad)
    ```
    """
    equalising = {"broadcast", "broadcast_", "broadcast_parameters", "broadcast_object",
                  "TorchState", "replicate", "prepare", "initialize", "fully_shard",
                  "FullyShardedDataParallel", "FSDP"}  # fmt: skip
    if info.ddp_calls or any(info.script.calls_named(*equalising)):
        return
    by_hand = any("grad" in info.script.source(a) for c in info.collectives for a in c.args)
    if not (by_hand or any(info.script.calls_of("horovod.torch.DistributedOptimizer"))):
        return
    built = [call for call in info.script.all(ast.Call) if _builds_layers(info, call)]
    seeds = list(info.script.calls_of("torch.manual_seed"))
    for seed in seeds:
        is_before = any(
            seed.lineno < c.lineno and info.script.are_in_one_function(c, seed) for c in built
        )
        if is_before and _seed_depends_on_rank(info, seed):
            yield Hit(
                seed,
                "each rank seeds differently and then builds the model",
                "from N = 2 on, the ranks train different models",
                "torch.manual_seed(seed)  # the same everywhere until the model is built",
            )


def _builds_layers(info: ScriptInfo, call: ast.Call) -> bool:
    """Whether a call makes a layer or a model, whose parameters are drawn."""
    full, word = info.script.full_name(call), info.script.call_name(call)
    if full.startswith("torch.nn."):
        return word[0].isupper() and not word.endswith("Loss")
    return full.startswith("torchvision.models.") or any(
        made.name == word
        and any(info.script.full_name(base).startswith("torch.nn.") for base in made.bases)
        for made in info.script.all(ast.ClassDef)
    )


@rule(
    "INS307",
    Severity.WARNING,
    "cudnn is asked to be deterministic and to benchmark.",
    RuleScope.PARALLEL,
)
def _deterministic_undone(info: ScriptInfo) -> Iterator[Hit]:
    """`cudnn.benchmark = True` measures and chooses algorithms anew in each process: two
    ranks, and two runs, may choose differently and round differently, although
    `cudnn.deterministic = True` asked for runs that can be repeated.

    ## Bad
    ```python
    import torch.backends.cudnn as cudnn
    import torch.distributed as dist

    cudnn.deterministic = True
    cudnn.benchmark = True
    ```

    ## Good
    ```python
    import torch.backends.cudnn as cudnn
    import torch.distributed as dist

    cudnn.deterministic = True
    cudnn.benchmark = False
    ```
    """
    switched = {"deterministic": [], "benchmark": []}  # type: dict[str, list[ast.Assign]]
    for plain in info.script.all(ast.Assign):
        target = info.script.full_name(plain.targets[0])
        prefix, _, last = target.rpartition(".")
        if prefix == "torch.backends.cudnn" and last in switched and constant(plain.value) is True:
            switched[last].append(plain)
    if any(
        info.script.full_name(plain.targets[0]) == "torch.backends.cudnn.benchmark"
        and constant(plain.value) is False
        for plain in info.script.all(ast.Assign)
    ):
        return  # it is switched off where it matters
    for benchmark in switched["benchmark"]:
        if any(not info.script.are_exclusive(d, benchmark) for d in switched["deterministic"]):
            yield Hit(
                benchmark,
                "cudnn.benchmark = True undoes cudnn.deterministic = True",
                "at any N, ranks and runs may choose different algorithms",
                "cudnn.benchmark = False",
            )
