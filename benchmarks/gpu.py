"""ResNet-50 in bfloat16 on one GPU: a step with instep over the same step of plain PyTorch.

    instep run -n 1 benchmarks/gpu.py --json gpu.json

`sharded` is instep with `instep.shard(optimizer)`. On several GPUs (-n N) also over PyTorch's DDP,
with the same batch on each GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel

import instep
from machine import machine, ratios, shown
from models import resnet50


def engine(loss: Tensor) -> None:
    """Backward without anything of instep's, which has stepped into torch.autograd.backward."""
    _engine_run_backward(
        *((loss,), (torch.ones_like(loss),), False, False, ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def step_of(name: str, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """One step of SGD with momentum."""
    torch.manual_seed(0)
    model: nn.Module = resnet50().to(device, memory_format=torch.channels_last)
    backward = engine
    if name in ("instep", "sharded"):
        instep.replicate(model)
        backward = Tensor.backward
    elif name == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if name == "sharded":
        instep.shard(optimizer)
    x = torch.randn(args.batch, 3, args.pixels, args.pixels, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (args.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        backward(loss)
        optimizer.step()

    return step


def timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Milliseconds for each of `count` steps."""
    _settle(device)
    start = perf_counter()
    for _ in range(count):
        step()
    _settle(device)
    return (perf_counter() - start) / count * 1e3


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--steps", type=int, default=10, help="of each block")
    args = parser.parse_args()
    world = instep.init()
    device = torch.device(args.device)
    names = ["plain", "instep", "sharded"] + ["ddp"] * (world.size > 1)
    steps = {name: step_of(name, args, device) for name in names}
    for step in steps.values():
        timed(step, args.steps, device)
    times: dict[str, list[float]] = {name: [] for name in names}
    shuffler = random.Random(0)
    for _ in range(args.blocks):
        for name in shuffler.sample(names, len(names)):
            times[name].append(timed(steps[name], args.steps, device))
    rows = {
        name: {
            "median_ms": statistics.median(taken),
            **{f"over_{base}": ratios(taken, times[base]) for base in names if base != name},
        }
        for name, taken in times.items()
    }
    if world.rank == 0:
        print(f"instep over plain: {shown(rows['instep']['over_plain'])}")
        if args.json:
            result: dict[str, Any] = {"machine": machine(), "ranks": world.size, "rows": rows}
            args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
