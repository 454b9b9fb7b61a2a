"""What it costs to watch a training: steps with everything on over steps with everything off.

    python benchmarks/watching.py --json watching.json

Both are timed inside the same processes, in blocks of steps that alternate; each block holds one
comparison of parameters. Off: the watchers are stopped by a signal, parameters are not compared,
and gradients are not checked for NaN and infinity. With --each, every one of these is also switched
off alone. The flight record has no switch: it is timed by itself, for the collectives of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
import torch.multiprocessing as mp

import instep
from instep.distributed.flight_record.record_format import COUNT
from instep.distributed.flight_record.recorder import recorder
from instep.training.drift import comparison
from machine import machine, ratios, shown
from step import replicated, timed, training_step

WATCHERS, COMPARISONS, GRADIENTS = "watchers", "comparisons", "gradient checks"
WAYS = {
    "on": (),
    "off": (WATCHERS, COMPARISONS, GRADIENTS),
    f"without {WATCHERS}": (WATCHERS,),
    f"without {COMPARISONS}": (COMPARISONS,),
    f"without {GRADIENTS}": (GRADIENTS,),
}
"""What is switched off in the blocks of each way."""
STEPS = 100
"""Of a block: the default of INSTEP_DRIFT_STEPS."""


@contextmanager
def switched_off(parts: tuple[str, ...]) -> Iterator[None]:
    """Without these parts on this rank."""
    checks = list(comparison._check_of.values())
    watchers = [
        child
        for child in psutil.Process().children()
        if any("instep.distributed.watchdog.watcher" in word for word in child.cmdline())
    ]
    assert checks, "no parameters are compared"
    assert watchers, "this rank has no watcher"
    if WATCHERS in parts:
        for watcher in watchers:
            watcher.send_signal(signal.SIGSTOP)
    if COMPARISONS in parts:
        for check in checks:
            check._every = 0
    if GRADIENTS in parts:
        os.environ["INSTEP_NAN"] = "off"
    try:
        yield
    finally:
        os.environ.pop("INSTEP_NAN", None)
        for check in checks:
            check._every = STEPS
        for watcher in watchers:
            watcher.send_signal(signal.SIGCONT)


def microseconds_of_record(count: int = 20000) -> float:
    """To note that one collective was entered and left."""
    group = recorder.add_group("benchmark", range(2))
    start = perf_counter()
    for _ in range(count):
        recorder.leave(recorder.enter("all_reduce", (1024,), torch.float32, group))
    return (perf_counter() - start) / count * 1e6


def rank_main(rank: int, asked: argparse.Namespace, store: str) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    instep.init(f"file://{store}", rank=rank, world_size=2)
    ways = list(WAYS) if asked.each else ["on", "off"]
    step = training_step(asked.model, replicated())
    timed(step, STEPS)
    before = recorder._words[COUNT]
    timed(step, 10)
    collectives = (recorder._words[COUNT] - before) / 10
    times: dict[str, list[float]] = {way: [] for way in ways}
    shuffler = random.Random(0)  # the same order on all ranks
    for block in range(asked.blocks):
        for way in shuffler.sample(ways, len(ways)):
            with switched_off(WAYS[way]):
                times[way].append(timed(step, STEPS) * 1e3)
        if rank == 0:
            print(f"block {block + 1} of {asked.blocks}", end="\r", flush=True)
    if rank:
        return
    median = statistics.median(times["on"])
    told: dict[str, Any] = {
        "machine": machine(),
        "model": asked.model,
        "blocks": asked.blocks,
        "steps_per_block": STEPS,
        "ms_per_step": {way: statistics.median(values) for way, values in times.items()},
        "on_over": {way: ratios(times["on"], times[way]) for way in ways if way != "on"},
        "flight_record": {
            "microseconds_per_collective": (each := microseconds_of_record()),
            "collectives_per_step": collectives,
            "share_of_step": each * collectives / 1e3 / median,
        },
    }
    for way, ratio in told["on_over"].items():
        print(f"on over {way:28} {ratio['median']:.4f} {shown(ratio)}")
    print(f"flight record: {told['flight_record']['share_of_step']:.3%} of a step")
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--blocks", type=int, default=25, help="timed blocks of each way (25)")
    parser.add_argument("--each", action="store_true", help="switch each part off alone, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (asked, str(Path(folder) / "store")), nprocs=2)


if __name__ == "__main__":
    main()
