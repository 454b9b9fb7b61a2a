"""Batch normalisation with the statistics of the batch of all ranks: by PyTorch's kernels and by
those in C, over PyTorch's own with the statistics of a rank's rows.

    python benchmarks/batch_norm.py --json batch_norm.json [--ranks 2]

Forward and backward of one layer, ranks of one thread. The contenders take turns; before each, a
convolution runs, as between the layers of a model, whose time does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import instep
from instep.training.normalization import batchnorm
from instep.training.normalization.cpu_kernels import cpu_kernels
from instep.training.normalization.kernels import Kernels
from machine import machine, quartiles, ratios, shown

SHAPES = ((6, 32, 32, 32), (6, 144, 16, 16), (6, 384, 4, 4), (6, 960, 2, 2), (16, 64, 56, 56))
OWN_ROWS, TORCH, IN_C = "own rows", "torch", "C"


def contenders(channels: int) -> dict[str, Callable[[Tensor], Tensor]]:
    layer = nn.BatchNorm2d(channels)
    arguments = (layer.running_mean, layer.running_var, layer.weight, layer.bias, True)

    def by(kernels: Callable[[], Kernels[Any, Any] | None], x: Tensor) -> Tensor:
        batchnorm.cpu_kernels = kernels  # asked at each call
        return batchnorm.batch_norm(x, *arguments)

    return {
        OWN_ROWS: layer,
        TORCH: functools.partial(by, none_built),
        IN_C: functools.partial(by, cpu_kernels),
    }


def none_built() -> None:
    """What cpu_kernels returns without a compiler."""


def measure(shape: tuple[int, ...], count: int) -> dict[str, Any]:
    """The figures of this rank."""
    generator = torch.Generator().manual_seed(instep.rank)
    x = torch.randn(shape, generator=generator).requires_grad_()
    grad = torch.randn(shape, generator=generator)
    image, convolution = torch.randn(6, 64, 16, 16), nn.Conv2d(64, 64, 3, padding=1)
    functions = contenders(shape[1])
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(count + 5):
        for name, function in functions.items():
            convolution(image).sum().backward()
            instep.barrier()
            begun = time.perf_counter()
            output = function(x)
            forward = time.perf_counter() - begun
            convolution(image).sum().backward()
            instep.barrier()
            begun = time.perf_counter()
            output.backward(grad)
            if turn >= 5:
                seconds[name].append(forward + time.perf_counter() - begun)
    return {
        name: {
            "microseconds": quartiles(measured)["median"] * 1e6,
            "over own rows": ratios(measured, seconds[OWN_ROWS]),
        }
        for name, measured in seconds.items()
    }


def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    instep.init(f"file://{store}", rank=rank, world_size=args.ranks)
    result: dict[str, Any] = {"machine": machine(), "ranks": args.ranks, "shapes": {}}
    for shape in SHAPES:
        name = " x ".join(map(str, shape))
        result["shapes"][name] = rows = measure(shape, args.count)
        if rank == 0:
            ours = (f"{kind} {shown(rows[kind]['over own rows'])}" for kind in (TORCH, IN_C))
            print(name, *ours, sep=", ")
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=200, help="of forwards of each contender")
    args = parser.parse_args()
    if cpu_kernels() is None:
        parser.error("the kernels in C are not built: pip install -e . where a C compiler is")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
