"""The time of one training step, with and without communication.

    python benchmarks/step.py --json step.json

Every strategy is timed inside the same processes, in shuffled blocks of steps, so that only ratios
within a round are compared. `none` is the lower bound: the same step, each rank for itself, and
with the memory that ranks of instep keep (malloc.py); peers.py has it in plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel

import instep
import instep.compat.horovod as hvd
from instep.distributed.communication.transport import get_transport
from instep.process.patching import PatchHandle
from instep.training.buckets.reducer import BackwardState, Reducer, reduce_during_backward
from instep.unedited.patch_table import SHARDED_CALL_PATCHES
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run.backward import backward as sharded_backward
from machine import machine, ratios, shown
from models import workload

Step = Callable[[], None]
Backward = Callable[[Tensor], None]
Strategy = Callable[[nn.Module], tuple[Callable[[Tensor], Any], Backward]]


def engine(loss: Tensor) -> None:
    """Backward without anything of instep's, which has stepped into torch.autograd.backward."""
    ones = (torch.ones_like(loss),)
    _engine_run_backward(
        (loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def ddp(backend: str = "gloo", **options: Any) -> Strategy:
    def strategy(model: nn.Module) -> tuple[nn.Module, Backward]:
        group = dist.new_group(backend=backend)
        return DistributedDataParallel(model, process_group=group, **options), engine

    return strategy


def replicated(**options: Any) -> Strategy:
    return lambda model: (instep.replicate(model, **options), torch.Tensor.backward)


def inexact(model: nn.Module) -> tuple[nn.Module, Backward]:
    """instep's sums of gradients and nothing else: what exactness costs is measured against it."""
    Reducer(list(model.parameters()), get_transport())

    def backward(loss: Tensor) -> None:
        with reduce_during_backward(BackwardState(is_placeholder=False, sync=True)):
            engine(loss / dist.get_world_size())

    return model, backward


def unedited(model: nn.Module) -> tuple[Callable[[Tensor], Any], Backward]:
    """What `instep run` does to a script that knows nothing of it: the batch is whole."""
    PatchHandle(
        patch for patch in SHARDED_CALL_PATCHES if patch.owner not in (nn.Module, torch.autograd)
    )
    call = nn.Module.__call__

    def backward(loss: Tensor) -> None:
        sharded_backward(lambda roots, *_: engine(roots), loss)

    return lambda inputs: modules.module_call(call)(model, inputs), backward


def horovod(model: nn.Module) -> tuple[nn.Module, Backward]:
    """hvd.DistributedOptimizer, on plain batch normalisation: beside it, `instep_local_bn`."""
    hvd.init()
    return model, engine


STRATEGIES: dict[str, Strategy] = {
    "none": lambda model: (model, engine),
    "ddp": ddp(),
    "ddp_view": ddp(gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False),
    "ddp_over_instep": ddp(backend="instep"),
    "instep": replicated(),
    "instep_local_bn": replicated(batch_statistics="rank"),
    "instep_inexact": inexact,
    "instep_unedited": unedited,
    "horovod": horovod,
}


def training_step(name: str, strategy: Strategy) -> Step:
    """One step of SGD with momentum on one rank's batch."""
    torch.manual_seed(0)
    load = workload(name, ranks=dist.get_world_size() if strategy is unedited else 1)
    model, backward = strategy(load.model)
    optimizer = torch.optim.SGD(load.model.parameters(), 0.01, momentum=0.9)
    if strategy is horovod:
        optimizer = hvd.DistributedOptimizer(optimizer, load.model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(load.inputs), load.targets))
        optimizer.step()

    return step


def timed(step: Step, count: int) -> float:
    """Seconds for each step, all ranks starting together and the slowest counting."""
    dist.barrier()
    start = perf_counter()
    for _ in range(count):
        step()
    seconds = torch.tensor((perf_counter() - start) / count)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def measure(
    name: str, strategies: list[str], blocks: int, seconds_per_block: float
) -> dict[str, list[float]]:
    """Milliseconds for each step, by strategy, one figure for each block."""
    steps = {strategy: training_step(name, STRATEGIES[strategy]) for strategy in strategies}
    return timed_in_blocks(steps, blocks, seconds_per_block)


def timed_in_blocks(
    steps: dict[str, Step], blocks: int, seconds_per_block: float
) -> dict[str, list[float]]:
    """Milliseconds for each step, by strategy, one figure for each block; in shuffled order."""
    for step in steps.values():
        timed(step, 2)
    order = list(steps)
    count = max(2, int(seconds_per_block / timed(steps[order[0]], 3)))
    times: dict[str, list[float]] = {strategy: [] for strategy in order}
    shuffler = random.Random(0)  # the same order on all ranks
    for block in range(blocks + 1):
        shuffler.shuffle(order)
        for strategy in order:
            milliseconds = timed(steps[strategy], count) * 1e3
            if block:  # the first is a warm-up
                times[strategy].append(milliseconds)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and quartiles of the ratios within each block."""
    result: dict[str, Any] = {}
    for strategy, values in times.items():
        result[strategy] = {"median_ms": statistics.median(values)}
        for base in ("none", "ddp", "instep", "instep_inexact"):
            if strategy != base and base in times:
                result[strategy][f"over_{base}"] = ratios(values, times[base])
    return result


def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    instep.init(f"file://{store}", rank=rank, world_size=args.ranks)
    result: dict[str, Any] = {"machine": machine(), "ranks": args.ranks, "models": {}}
    for name in args.models:
        times = measure(name, args.strategies, args.blocks, args.seconds)
        result["models"][name] = summary(times)
        if rank == 0:
            show(name, result["models"][name])
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def show(name: str, rows: dict[str, Any]) -> None:
    """A table on the screen."""
    print(f"\n{name:16} {'ms/step':>9} {'over none':>22} {'over ddp':>22}")
    for strategy, row in rows.items():
        found = (shown(row[key]) if key in row else "" for key in ("over_none", "over_ddp"))
        print(f"{strategy:16} {row['median_ms']:9.2f} " + " ".join(f"{r:>22}" for r in found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet18"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=31, help="timed blocks of each strategy")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each block, about")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
