"""Seconds per epoch of every way of examples/imagenet, side by side on this machine.

python benchmarks/imagenet.py --json imagenet.json --csv imagenet.csv --plot docs/images
python benchmarks/imagenet.py --ranks 8 --data IMAGENET -a resnet50 --size 224 -b 2048 -j 8

Each round runs all ways in another order, each in fresh processes; an epoch's time is that of the
last one, without validation, on its slowest rank, and with it goes the part of it for which that
rank waited for data. Without --data it makes images of its own. Horovod is that of .venv-peers.
srun starts ranks on this host, in the allocation that this runs in, or as root in a Slurm of its
own. What cannot be started here is left out, and said.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from machine import machine, ratios

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import components
from slurm import Slurm

HERE = Path(__file__).parent
WAYS = HERE.parent / "examples" / "imagenet"
DDP = str(HERE / "scripts" / "imagenet_ddp.py")
PYTHON = sys.executable
RUN = [PYTHON, "-m", "instep", "run", "-n", "{n}"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "{n}"]
MPIRUN = ["mpirun", "-n", "{n}"]
SRUN = ["srun", "-N1", "-n", "{n}", "--overcommit", "--cpu-bind=none"]
PEERS = components.PEERS
HOROVODRUN = [f"{PEERS}/horovodrun", "--disable-cache", "--gloo", "-np", "{n}"]
COMMANDS = {
    "one process": [PYTHON, "plain.py"],
    "DataParallel": [PYTHON, "dataparallel.py"],
    "DistributedDataParallel": [*TORCHRUN, DDP],
    "Horovod": [*HOROVODRUN, f"{PEERS}/python", "horovod_distributed.py"],
    "Horovod's rules, instep": [PYTHON, "-m", "instep", "horovodrun", "-np", "{n}", PYTHON,
                                "horovod_distributed.py"],
    "Apex's rules, instep": [*RUN, "apex_distributed.py"],
    "instep, unedited": [*RUN, "plain.py"],
    "instep, distributed": [*RUN, "distributed.py"],
    "instep, torchrun": [*TORCHRUN, "distributed.py"],
    "instep, spawn": [PYTHON, "spawn.py", "--nprocs", "{n}"],
    "instep, Jittor's style": [*MPIRUN, PYTHON, "jittor_style.py"],
    "instep, srun": [*SRUN, PYTHON, "slurm.py"],
}  # fmt: skip
"""Those whose names begin with instep have the numbers of one process. The two named for rules are
instep's implementation of them."""
ORIGINAL = {
    "DataParallel": 4138.3, "Horovod": 1200.3, "Distributed": 1188.5, "Apex": 1186.5
}  # fmt: skip
"""Seconds, from the chart of the article that docs/tutorial.md retells: ImageNet on four V100. It
does not say for how much work."""


class Epoch(NamedTuple):
    """One epoch of one way, as its slowest rank saw it."""

    seconds: float
    waited: float
    """The part of them, from 0 to 1, in which no batch was there."""


def left_out(name: str, ranks: int) -> str | None:
    """Why a way cannot be timed here, if so."""
    launcher = COMMANDS[name][0]
    if shutil.which(launcher) is None:
        return f"{Path(launcher).name} is not installed"
    if launcher == "srun" and "SLURM_JOB_ID" not in os.environ:
        return components.missing("Slurm")
    if name == "Horovod" and torch.cuda.is_available():
        return "scripts/horovod builds it for CPUs"
    if name == "DataParallel" and torch.cuda.device_count() < 2:
        return "DataParallel divides among GPUs of one host; there are fewer than 2"
    return None if ranks > 1 or name == "one process" else "one rank"


@contextmanager
def allocation(ways: Iterable[str]) -> Iterator[dict[str, str]]:
    """The variables by which srun finds a Slurm, which is started where there is none."""
    if "SLURM_JOB_ID" in os.environ or not any(COMMANDS[way][0] == "srun" for way in ways):
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            yield cluster.environ
        finally:
            cluster.stop()


def last_epoch(
    name: str, ranks: int, flags: list[str], folder: Path, variables: dict[str, str]
) -> Epoch:
    """Run a way to its end."""
    words = [word.format(n=ranks) for word in COMMANDS[name]]
    command = [str(WAYS / word) if word in SCRIPTS else word for word in words]
    out = folder / "out"
    cores = os.cpu_count() or 1
    threads = cores if name == "one process" else max(1, cores // ranks)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | variables
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    ran = subprocess.run(
        [*command, *flags, "--out", str(out)],
        env=environment | (root if os.getuid() == 0 else {}),
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"{name}: {' '.join(command)} ended with {ran.returncode}:\n{ran.stderr}")
    with (out / "ranks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shutil.rmtree(out)
    last = [row for row in rows if row["epoch"] == rows[-1]["epoch"]]
    seconds, waited = max((float(row["seconds"]), float(row["data_wait"])) for row in last)
    return Epoch(seconds, waited / seconds)


SCRIPTS = {path.name for path in WAYS.glob("*.py")}


def summary(times: dict[str, list[Epoch]]) -> dict[str, Any]:
    """Medians, and ratios within a round to DistributedDataParallel."""
    base = times.get("DistributedDataParallel")
    found: dict[str, Any] = {}
    for name, taken in times.items():
        seconds = [epoch.seconds for epoch in taken]
        waited = statistics.median(epoch.waited for epoch in taken)
        found[name] = {"seconds": statistics.median(seconds), "all": seconds, "waited": waited}
        if base:
            found[name]["over_ddp"] = ratios(seconds, [epoch.seconds for epoch in base])
    return found


def bars(path: Path, title: str, label: str, values: dict[str, list[float]]) -> None:
    """A chart of medians, with lines from the least to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(values)[::-1]
    middle = [statistics.median(values[name]) for name in names]
    spread = [
        [m - min(values[name]) for name, m in zip(names, middle, strict=True)],
        [max(values[name]) - m for name, m in zip(names, middle, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.38 * len(names)), layout="constrained")
    colours = [colour(name) for name in names]
    drawn = axes.barh(names, middle, xerr=spread, color=colours, error_kw={"ecolor": "#444444"})
    axes.bar_label(drawn, [f"{m:.1f}" if m > 100 else f"{m:.3g}" for m in middle], padding=6)
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def colour(way: str) -> str:
    """Of instep's ways, of others' rules by instep, of the others."""
    if way.startswith("instep"):
        return "#2a6f97"
    return "#8ab6d1" if way.endswith("instep") else "#b8b8b8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=torch.cuda.device_count() or 2)
    add("--rounds", type=int, default=5)
    add("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), metavar="WAY")
    add("--data", type=Path, help="ImageNet's layout; else made")
    add("--train", type=int, default=100, help="images of each class to make (default: 100)")
    add("--size", default="64")
    add("--json", type=Path)
    add("--csv", type=Path)
    add("--plot", type=Path, metavar="FOLDER", help="imagenet.png and imagenet-2019.png go there")
    args, flags = parser.parse_known_args()  # the others are the ways'
    whys = {name: left_out(name, args.ranks) for name in args.only}
    times: dict[str, list[Epoch]] = {name: [] for name, why in whys.items() if why is None}
    flags = [*(flags or ["-b", "32", "-j", "1", "--epochs", "2"]), "--size", args.size]
    with tempfile.TemporaryDirectory() as name, allocation(times) as variables:
        folder = Path(name)
        if args.data is None:
            args.data = folder / "data"
            make = [PYTHON, WAYS / "make_data.py", args.data, "--size", args.size, "--val", "1"]
            subprocess.run([*map(str, make), "--train", str(args.train)], check=True)
        flags += ["--data", str(args.data.resolve())]
        for turn in range(args.rounds):
            for way in random.Random(turn).sample(list(times), len(times)):
                epoch = last_epoch(way, args.ranks, flags, folder, variables)
                times[way].append(epoch)
                seen = f"{epoch.seconds:.2f} s, waited for {epoch.waited:.0%} of it"
                print(f"round {turn + 1}: {way}: {seen}", flush=True)
    result = {
        "machine": machine(), "ranks": args.ranks, "flags": flags[:-2],
        "left_out": {name: why for name, why in whys.items() if why}, "ways": summary(times),
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            rows = [
                (way, i + 1, *epoch) for way, all_ in times.items() for i, epoch in enumerate(all_)
            ]
            head = ("way", "round", "seconds_per_epoch", "part_waited_for_data")
            csv.writer(file).writerows([head, *rows])
    if args.plot:
        drawn = {way: [epoch.seconds for epoch in all_] for way, all_ in times.items()}
        title = f"One epoch on {args.ranks} ranks, rounds: {args.rounds}"
        bars(args.plot / "imagenet.png", title, "seconds per epoch (median, range)", drawn)
        then = {name: [value] for name, value in ORIGINAL.items()}
        title = "As charted in 2019: ImageNet on four V100, other data and hardware"
        bars(args.plot / "imagenet-2019.png", title, "seconds", then)


if __name__ == "__main__":
    main()
