"""ResNet-50 at each precision level on one GPU: time and memory of a training step.

    python benchmarks/precision.py --json precision.json

Each level is trained from the same parameters, by the same steps, in a process of its own, the
levels in turn and over again. That it runs is shown by
`--device cpu --batch-size 2 --size 32 --warm-up 0 --steps 1 --rounds 1`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from instep import precision
from models import resnet50

LEVELS = {
    "O0": ("O0", torch.float16),
    "O1 float16": ("O1", torch.float16),
    "O2 float16": ("O2", torch.float16),
    "O1 bfloat16": ("O1", torch.bfloat16),
    "O2 bfloat16": ("O2", torch.bfloat16),
}


class Measured(NamedTuple):
    """One training at one level."""

    seconds: float
    """Median time of a step."""
    bytes: int
    """Most memory that was in use on the GPU; 0 on the CPU."""
    loss: float
    """Of the last step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu shows that it runs.")
    rounds: dict[str, list[Measured]] = {name: [] for name in LEVELS}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for _ in range(args.rounds):
            for name in LEVELS:
                given = (name, args.device, args.batch_size, args.size, args.warm_up, args.steps)
                rounds[name].append(pool.apply(measure, given))
    figures = {
        name: {
            "seconds": statistics.median(m.seconds for m in measured),
            "bytes": max(m.bytes for m in measured),
            "loss": measured[-1].loss,
        }
        for name, measured in rounds.items()
    }
    for name, figure in figures.items():
        ratio = figure["seconds"] / figures["O0"]["seconds"]
        print(
            f"{name:12} {figure['seconds'] * 1e3:8.1f} ms  {ratio:5.2f} of O0  "
            f"{figure['bytes'] / 2**20:8.0f} MiB  loss {figure['loss']:.3f}"
        )
    if args.json:
        about = {"device": device_name(args.device), "torch": torch.__version__, **vars(args)}
        with open(args.json, "w") as file:
            json.dump({"about": about, "levels": figures}, file, indent=1)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def measure(
    name: str, device: str, batch_size: int, size: int, warm_up: int, steps: int
) -> Measured:
    torch.manual_seed(0)
    model = resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    level, dtype = LEVELS[name]
    amp = precision.prepare(model, optimizer, level, dtype=dtype)
    x = torch.randn(batch_size, 3, size, size, device=device)
    y = torch.randint(0, 1000, (batch_size,), device=device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        with amp.scale(loss) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(warm_up):
        step()
    times = []
    for _ in range(steps):
        wait_for(device)
        start = perf_counter()
        loss = step()
        wait_for(device)
        times.append(perf_counter() - start)
    used = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Measured(statistics.median(times), used, loss.item())


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
