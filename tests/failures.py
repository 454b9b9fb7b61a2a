"""What happens under each launcher when a rank fails: the table that README and the issue speak of.

    python -m tests.failures --json failures.json

Two ranks meet, and rank 1 fails in some way while rank 0 is busy in another. For each launcher the
table has the seconds until nothing of the job is left, the exit code of the launcher, and whether
what it printed names the rank that was to blame.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import components
import slurm
from launching import LAUNCHER_VARIABLES, free_port
from machine import machine

LIMIT = 25.0
"""Seconds after the failure, after which a job that is still up is HUNG."""
SCRIPT = """
import ctypes, os, signal, sys, time

inherited = [fd for fd in range(100) if os.path.exists(f"/proc/self/fd/{fd}")]
import torch
import instep

folder, fails, busy = sys.argv[1:4]
instep.all_reduce  # imports what it needs: "busy" is written when rank 0 is about to wait
if busy != "meeting":
    instep.all_reduce(torch.ones(2))
if instep.rank == 1:
    if busy == "held":  # a process that a rank leaves behind keeps its connections open
        if os.fork() == 0:
            os.setsid()
            for launchers in inherited:  # who would wait for their end
                os.close(launchers)
            open(f"{folder}/holder", "w").write(str(os.getpid()))
            signal.pause()
        while not os.path.exists(f"{folder}/holder"):
            time.sleep(0.01)
    while not os.path.exists(f"{folder}/busy"):
        time.sleep(0.01)
    time.sleep(0.2)
    open(f"{folder}/moment", "w").write(repr(time.time()))
    if fails == "raise":
        raise ValueError("boo")
    if fails == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(fails.removeprefix("exit ")))
open(f"{folder}/busy", "w").close()
if busy in ("meeting", "collective", "held"):
    instep.all_reduce(torch.ones(2))
elif busy == "loading":
    os.read(os.pipe()[0], 1) if fails != "exit 0" else time.sleep(3)
else:
    ctypes.PyDLL(None).sleep(60 if fails != "exit 0" else 3)
"""
FAILS = ("raise", "kill", "exit 0", "exit 3")
"""Ways in which rank 1 ends."""
BUSY = {
    "meeting": "waiting for rank 1 to arrive",
    "collective": "in a collective, whose connection breaks",
    "held": "in a collective, whose connection stays (a child of the dead rank holds it)",
    "loading": "in data loading",
    "gil": "in C code that holds the interpreter lock",
}
"""What rank 0 does meanwhile."""
RUN = [sys.executable, "-m", "instep", "run", "-n", "2"]
SPAWNING = """
import os, runpy, sys
import torch.multiprocessing as mp

def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    runpy.run_path(sys.argv[0], run_name="rank")

if __name__ == "__main__":
    del sys.argv[0]
    mp.spawn(main, nprocs=2)
"""


@dataclass(frozen=True)
class Cell:
    """One failure under one launcher."""

    launcher: str
    fails: str
    busy: str
    seconds: float | None
    """From the failure until nothing of the job is left; None: HUNG."""
    code: int | None
    """The launcher's exit code."""
    culprit: bool
    """Whether the output names rank 1, or the rank that waits for it in vain."""
    output: str

    @property
    def finishes(self) -> bool:
        """Whether rank 0 has nothing to complain of: it did not need rank 1 any more."""
        return self.fails == "exit 0" and self.busy in ("loading", "gil")

    def to_json(self) -> dict[str, object]:
        """All of it, and its text; the output only where something is wrong."""
        wrong = self.seconds is None or not (self.culprit or self.finishes)
        return asdict(self) | {"output": self.output if wrong else "", "says": str(self)}

    def __str__(self) -> str:
        if self.seconds is None:
            return "HUNG"
        time_ = "goes on" if self.finishes and self.code == 0 else f"{self.seconds:.1f}"
        named = "" if self.culprit or self.finishes else " unnamed"
        return f"{time_} rc{self.code}{named}"


@dataclass(frozen=True)
class Launcher:
    """How two ranks are started."""

    name: str
    command: Sequence[str]
    environ: dict[str, str]
    unseen: Sequence[str] = ()
    """Failures before the ranks have met that nobody sees: then rank 0 waits for INSTEP_TIMEOUT."""


class Jobs:
    """Starts jobs, each in a folder of its own; the cluster runs as long as this."""

    def __init__(self, folder: Path, cluster: slurm.Slurm | None) -> None:
        self._folder, self._cluster = folder, cluster
        self._numbers = itertools.count(1)
        self._spawning = folder / "spawning.py"
        self._spawning.write_text(SPAWNING)

    def launchers(self) -> Iterator[Launcher]:
        """Those that are there."""
        python = sys.executable
        yield Launcher("instep run", RUN, {})
        elastic = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1")
        torchrun = [python, "-m", "torch.distributed.run", *elastic]
        yield Launcher("torchrun", [*torchrun, "--rdzv-endpoint", "127.0.0.1:0"], {})
        yield Launcher("mp.spawn", [python, str(self._spawning)], _bare(), unseen=["exit 0"])
        yield Launcher("two bare processes", ["sh", "-c", BARE, python], _bare())
        if components.missing("Open MPI") is None:
            root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
            mpirun = ["mpirun.openmpi", "--mca", "oob_tcp_if_include", "lo", "--oversubscribe"]
            yield Launcher("Open MPI", [*mpirun, "--bind-to", "none", "-n", "2", python], root)
        if components.missing("MPICH") is None:
            yield Launcher("MPICH", ["mpirun.mpich", "-n", "2", python], {})
        if self._cluster is not None:
            environ = self._cluster.environ | {"GLOO_SOCKET_IFNAME": "lo"}
            # Nobody is left on the second node, and srun waits for the first.
            yield Launcher("srun", ["srun", "-N2", "-n2", python], environ, unseen=FAILS)
            yield Launcher("srun, one node", ["srun", "-N1", "-n2", python], environ)

    def fail(self, launcher: Launcher, fails: str, busy: str) -> Cell:
        """Start a job that fails so, and see what becomes of it."""
        number = next(self._numbers)
        folder = self._folder / f"job{number}"
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(SCRIPT)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
        mark = f"{self._folder}/{number}"
        environ |= {"OMP_NUM_THREADS": "1", "FAILURES_TEST": mark, "INSTEP_TIMEOUT": "120"}
        if busy == "held":
            environ["INSTEP_BACKEND"] = "gloo"  # shared memory sees for itself that a rank has left
        environ |= launcher.environ
        with open(folder / "output", "wb") as output:
            job = subprocess.Popen(
                [*launcher.command, str(script), str(folder), fails, busy],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ,
            )  # fmt: skip
            try:
                down = _until_down(job, folder, mark)
            finally:
                _end(job, folder, mark)
        text = (folder / "output").read_text(errors="replace")
        moment = float((folder / "moment").read_text())
        seconds = None if down is None else down - moment
        code = None if down is None else job.returncode
        return Cell(launcher.name, fails, busy, seconds, code, _is_named(text, fails), text)


BARE = """
RANK=0 "$0" "$@" & first=$!
RANK=1 "$0" "$@" & second=$!
wait $first; a=$?
wait $second; b=$?
exit $((a > b ? a : b))
"""


def _bare() -> dict[str, str]:
    port = str(free_port())
    return {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _until_down(job: subprocess.Popen[bytes], folder: Path, mark: str) -> float | None:
    """The moment at which the launcher and all its ranks have ended; None if they do not."""
    moment = folder / "moment"
    while job.poll() is None and not moment.exists():
        time.sleep(0.02)
    assert moment.exists(), (folder / "output").read_text()
    deadline = time.time() + LIMIT
    while time.time() < deadline:
        if job.poll() is not None and not _processes(folder, mark):
            return time.time()
        time.sleep(0.02)
    return None


def _processes(folder: Path, mark: str) -> list[psutil.Process]:
    """What lives of a job, but for the child that its rank left behind on purpose."""
    holder = folder / "holder"
    left_behind = int(holder.read_text() or 0) if holder.exists() else 0
    return [p for p in psutil.process_iter() if p.pid != left_behind and _carries(p, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("FAILURES_TEST") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _end(job: subprocess.Popen[bytes], folder: Path, mark: str) -> None:
    for process in psutil.process_iter():
        if _carries(process, mark):
            process.kill()
    job.wait()


BY_THE_LAUNCHER = r"process rank 1 |[Pp]rocess 1 terminated|Root Cause.*?rank +: 1 "
"""How Open MPI, mp.spawn and torchrun say who it was."""


def _is_named(text: str, fails: str) -> bool:
    """Whether instep's last sentence has rank 1, or else the launcher's, and its traceback is there
    once."""
    once = fails != "raise" or text.count("ValueError: boo\n") == 1
    sentences = re.findall(r"(?:instep|\w+Error): (.*rank \d.*|.*ranks.*)", text)
    if not sentences:  # before the ranks have met, launchers end them by themselves
        return bool(re.search(BY_THE_LAUNCHER, text, re.DOTALL)) and once
    return "rank 1" in sentences[-1] and once


@contextmanager
def all_jobs(folder: Path) -> Iterator[Jobs]:
    """With a Slurm of its own, where there can be one."""
    with ExitStack() as stack:
        cluster = None
        if components.missing("Slurm") is None:
            (folder / "slurm").mkdir()
            cluster = slurm.Slurm(folder / "slurm")
            stack.callback(cluster.stop)
            cluster.start()
        yield Jobs(folder, cluster)


def show(cells: Sequence[Cell], launchers: Sequence[Launcher], asked: argparse.Namespace) -> None:
    """A table for each way in which rank 0 is busy: a row by launcher, a column by failure."""
    texts = {(cell.launcher, cell.busy, cell.fails): str(cell) for cell in cells}
    for busy in asked.busy:
        print(f"\nrank 0 is {BUSY[busy]}:")
        print(f"{'':20}" + "".join(f"{fails:>16}" for fails in asked.fails))
        for launcher in launchers:
            row = (texts.get((launcher.name, busy, fails), "waits") for fails in asked.fails)
            print(f"{launcher.name:20}" + "".join(f"{text:>16}" for text in row))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--launchers", nargs="+", help="only these")
    parser.add_argument("--fails", nargs="+", default=FAILS, choices=FAILS)
    parser.add_argument("--busy", nargs="+", default=list(BUSY), choices=BUSY)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cells = []
    with (
        tempfile.TemporaryDirectory(prefix="instep-failures-") as folder,
        all_jobs(Path(folder)) as jobs,
    ):
        launchers = [
            launcher
            for launcher in jobs.launchers()
            if not asked.launchers or launcher.name in asked.launchers
        ]
        for launcher, busy, fails in itertools.product(launchers, asked.busy, asked.fails):
            if busy == "meeting" and fails in launcher.unseen:
                continue
            cells.append(jobs.fail(launcher, fails, busy))
            print(f"{launcher.name}, {busy}, {fails}: {cells[-1]}", flush=True)
    show(cells, launchers, asked)
    if asked.json:
        told = {"machine": machine(), "cells": [cell.to_json() for cell in cells]}
        Path(asked.json).write_text(json.dumps(told, indent=2) + "\n")
    return int(any(cell.seconds is None for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
