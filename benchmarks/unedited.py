"""What an unedited script gains on N ranks, and what its outputs cost.

    python benchmarks/unedited.py --json unedited.json

The script is benchmarks/scripts/classifier.py, on N ranks of one thread and on one rank of one
thread, in turns. Outputs: the time to gather a model's output on every rank, by its size, and that
of the loss computed from each rank's own rows instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy

import instep
from instep.distributed.communication.transport import get_transport
from instep.training.blocks import Block
from instep.unedited.sharded_call.run.losses import loss
from instep.unedited.sharded_call.run.mappings import gather_from_region
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from machine import machine, ratios

SCRIPT = Path(__file__).parent / "scripts" / "classifier.py"
ROWS = 64
WIDTHS = (10, 1000, 16_000, 256_000)


def epoch(ranks: int, samples: int) -> tuple[float, float]:
    """Seconds of training and of evaluation, of the second epoch."""
    command = [sys.executable, "-m", "instep", "run", "-n", str(ranks), str(SCRIPT), str(samples)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = printed.splitlines()[-1].split()
    return float(words[2]), float(words[3])


def epochs(ranks: int, samples: int, rounds: int) -> dict[str, dict[str, float]]:
    """Quartiles of the ratios of N ranks to one."""
    pairs = [(epoch(1, samples), epoch(ranks, samples)) for _ in range(rounds)]
    return {
        name: ratios([many[k] for _, many in pairs], [one[k] for one, _ in pairs])
        for k, name in enumerate(("training", "evaluation"))
    }


def outputs(rank: int, ranks: int, folder: str) -> None:
    """Milliseconds per step for outputs of some widths; rank 0 writes them."""
    torch.set_num_threads(1)
    instep.init(f"file://{folder}/store", rank=rank, world_size=ranks)
    way, block = get_transport(), Block(rank, ranks, ROWS)
    found = {}
    for width in WIDTHS:
        own = torch.randn(block.count, width, requires_grad=True)
        target = torch.randint(0, width, (ROWS,), generator=torch.Generator().manual_seed(0))

        def gathered(own: Tensor = own, target: Tensor = target) -> Tensor:
            return cross_entropy(gather_from_region(own, block, 0, way), target)

        def kept(own: Tensor = own, target: Tensor = target) -> Tensor:
            return loss(cross_entropy, ShardedOutput.of(own, block, way), target)

        mine = target[block.start : block.stop]
        alone = timed(lambda own=own, mine=mine: cross_entropy(own, mine))
        found[f"{ROWS * width * 4} bytes"] = {
            "loss_of_own_rows_alone_ms": alone,
            "gathered_ms": timed(gathered),
            "rows_kept_ms": timed(kept),
        }
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))


def timed(step: Callable[[], Tensor]) -> float:
    """The median of some steps, forward and backward, in milliseconds."""
    times = []
    for _ in range(25):
        instep.barrier()
        start = perf_counter()
        step().backward()
        times.append((perf_counter() - start) * 1e3)
    return statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=432)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, object] = {"machine": machine(), "ranks": args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(outputs, (args.ranks, folder), nprocs=args.ranks)
        result["outputs"] = json.loads(Path(folder, "found").read_text())
    result["epoch_over_one_rank"] = epochs(args.ranks, args.samples, args.rounds)
    print(json.dumps(result, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
