"""A training step with `instep.shard(optimizer)`, without it, and without communication.

    python benchmarks/sharded_optimizer.py --json sharded_optimizer.json

All are timed inside the same processes, in shuffled blocks of steps; ratios are those of a
round, and the rounds those of several launches: how near the ranks' memory and caches are to each
other is decided anew. `none` is the same step, each rank for itself, and with the memory that ranks
of instep keep.
`own_copies`: with `instep.shard(optimizer)` and INSTEP_HOST_COPY=off.
`state_share` is the state of the optimizer that a rank holds over that of the undivided one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import Optimizer

import instep
from instep.training.optimizer_shards.sharded_step import _SHARDS
from machine import machine, ratios, shown
from models import workload
from step import Step, timed_in_blocks

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
}
STRATEGIES = ("none", "replicated", "own_copies", "sharded")


def training_step(name: str, kind: str, strategy: str) -> tuple[Step, Optimizer]:
    """A training step of the model `name`, and its optimizer."""
    torch.manual_seed(0)
    load = workload(name)
    if strategy != "none":
        instep.replicate(load.model)
    optimizer = OPTIMIZERS[kind](load.model.parameters())
    if strategy in ("own_copies", "sharded"):
        instep.shard(optimizer)
    copies = "off" if strategy == "own_copies" else "on"

    def step() -> None:
        os.environ["INSTEP_HOST_COPY"] = copies
        optimizer.zero_grad()
        nn.functional.cross_entropy(load.model(load.inputs), load.targets).backward()
        optimizer.step()

    return step, optimizer


def measure(name: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each strategy by rounds, and the share of the state."""
    made = {strategy: training_step(name, kind, strategy) for strategy in STRATEGIES}
    steps = {strategy: step for strategy, (step, _) in made.items()}
    times = timed_in_blocks(steps, args.blocks, args.seconds)
    held = state_bytes(made["sharded"][1])
    return {"times": times, "state_share": held / state_bytes(made["replicated"][1])}


def summary(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the quartiles of the ratios within each round, of all launches."""
    times: dict[str, list[float]] = {
        strategy: list(chain.from_iterable(each["times"][strategy] for each in launches))
        for strategy in STRATEGIES
    }
    result: dict[str, Any] = {
        strategy: {"median_ms": statistics.median(values)} for strategy, values in times.items()
    }
    for strategy in STRATEGIES[1:]:
        result[strategy]["over_none"] = ratios(times[strategy], times["none"])
    result["sharded"]["over_own_copies"] = ratios(times["sharded"], times["own_copies"])
    result["sharded"]["state_share"] = launches[0]["state_share"]
    return result


def state_bytes(optimizer: Optimizer) -> int:
    """The bytes of the optimizer's state that this rank holds."""
    shards = getattr(optimizer, _SHARDS, None)
    state = optimizer.state if shards is None else shards.local_state
    return sum(
        value.nbytes
        for entries in state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    )


def rank_main(rank: int, model: str, kind: str, args: argparse.Namespace, folder: str) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    instep.init(f"file://{folder}/store", rank=rank, world_size=args.ranks)
    measured = measure(model, kind, args)
    if rank == 0:
        Path(folder, "measured").write_text(json.dumps(measured))


def launch(model: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """What new processes measure."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (model, kind, args, folder), nprocs=args.ranks)
        measured: dict[str, Any] = json.loads(Path(folder, "measured").read_text())
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet18"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=7, help="rounds of each launch")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each strategy, about")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "ranks": args.ranks, "models": {}}
    for model, kind in itertools.product(args.models, OPTIMIZERS):
        rows = summary([launch(model, kind, args) for _ in range(args.launches)])
        result["models"][f"{model}, {kind}"] = rows
        print(f"{model}, {kind}: none {rows['none']['median_ms']:.2f} ms", end="")
        for strategy in STRATEGIES[1:]:
            print(f", {strategy} {shown(rows[strategy]['over_none'])}", end="")
        print(f"; {rows['sharded']['state_share']:.3f} of the state on each rank", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
