"""The output of a training: lines and a bar on the terminal, CSV files, TensorBoard's curves."""

from __future__ import annotations

import csv
import resource
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from loop import Means, Ranks

TIMINGS = ("seconds", "samples", "data_wait", "communication", "memory_mib", "gpu_percent")


class Clock:
    """Measures one rank's time in one epoch."""

    def __init__(self) -> None:
        self.begin = perf_counter()
        self.samples, self.steps, self.data_wait = 0, 0, 0.0
        self.busy: list[float] = []

    def waiting(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, and measure the seconds spent waiting for them."""
        batches = iter(loader)
        while True:
            asked = perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.data_wait += perf_counter() - asked
            self.steps += 1
            yield batch

    def timings(self, ranks: Ranks, parameters: int) -> list[list[float]]:
        """One row of TIMINGS for each rank, the same on all. Collective.

        communication: the seconds that summing the gradients of this epoch takes where nothing
        hides it; one such sum is timed, after the epoch. gpu_percent: NaN where nobody tells.
        """
        seconds = perf_counter() - self.begin
        gradients = torch.zeros(parameters)
        if torch.cuda.is_available():
            gradients = gradients.cuda()
        ranks.total(gradients[:1])  # waits until all ranks have arrived
        asked = perf_counter()
        ranks.total(gradients)[0].item()
        communication = (perf_counter() - asked) * self.steps if ranks.size > 1 else 0.0
        busy = sum(self.busy) / len(self.busy) if self.busy else float("nan")
        mine = (seconds, self.samples, self.data_wait, communication, memory_mib(), busy)
        # Each rank fills its own row of the table; the sum over ranks is the whole table.
        table = torch.zeros(ranks.size, len(TIMINGS), dtype=torch.float64, device=gradients.device)
        table[ranks.rank] = torch.tensor(mine, dtype=torch.float64)
        return ranks.total(table).tolist()


def memory_mib() -> float:
    """The peak memory of this process, on its GPU if it has one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def gpu_percent() -> float | None:
    if not torch.cuda.is_available():
        return None
    try:
        return float(torch.cuda.utilization())
    except (ModuleNotFoundError, RuntimeError):  # needs nvidia-ml-py and a driver that supports it
        return None


class Records:
    """Lines, files and curves of one training; rank 0 writes."""

    def __init__(self, args: Namespace, ranks: Ranks, steps: int, *, anew: bool) -> None:
        self.every, self.steps, self.writes = args.print_freq, steps, ranks.rank == 0
        self.out: Path = args.out
        self.board = None
        if not self.writes:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        if anew:
            for name in ("epochs.csv", "ranks.csv"):
                (self.out / name).unlink(missing_ok=True)
        if args.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise SystemExit(
                    "--tensorboard needs TensorBoard: pip install tensorboard"
                ) from error
            self.board = SummaryWriter(str(self.out))

    def step(self, epoch: int, step: int, sums: Tensor, clock: Clock) -> None:
        """Print the progress. `sums` are rank 0's own until the end of the epoch."""
        last = step + 1 == self.steps
        if self.writes and sys.stderr.isatty():
            filled = 30 * (step + 1) // self.steps
            bar = "#" * filled + "." * (30 - filled)
            end = "\n" if last else ""
            print(f"\r[{bar}] {step + 1}/{self.steps} ", end=end, file=sys.stderr, flush=True)
        if (step + 1) % self.every and not last:
            return
        if (busy := gpu_percent()) is not None:
            clock.busy.append(busy)
        if self.writes:
            loss, top1, _, samples = sums.tolist()
            speed = clock.samples / (perf_counter() - clock.begin)
            print(
                f"epoch {epoch + 1} step {step + 1}/{self.steps}: loss {loss / samples:.4f}  "
                f"top-1 {top1 / samples:.1%}  {speed:.0f} samples/s on rank 0",
                flush=True,
            )

    def epoch(self, epoch: int, trained: Means, means: Means, timings: list[list[float]]) -> None:
        """Write an epoch's rows and points."""
        columns = {
            f"{part}_{name}": value
            for part, of in (("train", trained), ("val", means))
            for name, value in of._asdict().items()
        }
        append(self.out / "epochs.csv", [{"epoch": epoch + 1} | columns])
        rows = [dict(zip(TIMINGS, row, strict=True)) for row in timings]
        append(
            self.out / "ranks.csv",
            [
                {"epoch": epoch + 1, "rank": rank}
                | row
                | {"samples_per_second": row["samples"] / row["seconds"]}
                for rank, row in enumerate(rows)
            ],
        )
        if self.board is not None:
            for name, value in columns.items():
                self.board.add_scalar(name.replace("_", "/"), value, epoch + 1)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def append(path: Path, rows: list[dict[str, float]]) -> None:
    """Add rows to a CSV file; a new file gets the names of the columns first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
