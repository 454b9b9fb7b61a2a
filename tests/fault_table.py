"""One rank fails while the others wait for it: who is named, with which line, and how soon.

    python tests/fault_table.py --json faults.json

Each fault happens on rank 1 of 2, in a script with explicit calls and in an unedited one, under
`instep run` and as two processes that only the usual variables tell who they are. `failures.py` has
the other table: the same few faults under every launcher.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from launching import LAUNCHER_VARIABLES, free_port
from machine import machine

LIMIT = 90.0
"""Seconds after which a job HUNG."""
EXPLICIT = """
import instep
def together():
    instep.all_reduce(torch.ones(2))
def mine():
    return instep.rank
"""
UNEDITED = """
model = torch.nn.Linear(4, 4)
def together():
    model(torch.ones(8, 4))
def mine():
    return int(open("/proc/self/environ").read().split("\\0RANK=")[1].split("\\0")[0])
"""
SCRIPT = """
import ctypes, os, signal, socket, sys, time, torch
{door}
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")
class Unfit(torch.nn.Module):
    def forward(self, x):
        raise ValueError("boo")
def fail():
    {fault}
together()
together()
if mine() == 1:
    where = ("127.0.0.1", int(os.environ["MOMENT"]))
    socket.socket(type=socket.SOCK_DGRAM).sendto(repr(time.time()).encode(), where)
    fail()  # the fault's line
together()
"""
ENDS_EARLY = (
    r"rank 1 of 2 ended with exit code 0 while rank 0 waited|rank 1 waits in exit at the end"
)
FAILED = r"rank 1 of 2 failed \(exit code 1\)"
RAISES = FAILED + r"[^$]*fail\(\)[^$]*"
FAULTS: dict[str, tuple[str, str]] = {
    "raise": ("raise ValueError('boo')", RAISES + "ValueError: boo"),
    "raise in a module's forward": ("Unfit()(torch.ones(8, 4))", RAISES + "ValueError: boo"),
    "an exception whose __str__ raises": ("raise Mute", RAISES + "Mute: <exception str"),
    "sys.exit(3)": ("sys.exit(3)", r"rank 1 of 2 (exited with code 3|failed \(exit code 3\))"),
    "sys.exit(0)": ("sys.exit(0)", ENDS_EARLY),
    "os._exit(0)": ("os._exit(0)", ENDS_EARLY),
    "os._exit(3)": ("os._exit(3)", r"rank 1 of 2 exited with code 3"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", r"rank 1 of 2 [^$]*fail\(\)[^$]*KeyboardInt"),
    "a collective in finally": (
        "try:\n        raise ValueError('boo')\n    finally:\n        together(); together()",
        FAILED + r"[^$]*ValueError: boo|ranks wait for each other[^$]*rank 1 waits in",
    ),
    "SIGSEGV": ("ctypes.string_at(0)", r"rank 1 of 2 was killed by SIGSEGV[^$]*line \d+ in fail"),
    "SIGABRT": ("os.abort()", r"rank 1 of 2 was killed by SIGABRT[^$]*line \d+ in fail"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", r"rank 1 of 2 was killed by SIGKILL[^$]*last seen at"),
    "SIGTERM": ("os.kill(os.getpid(), 15)", r"rank 1 of 2 was killed by SIGTERM[^$]*last seen at"),
    "another collective": (
        "import torch.distributed as d; d.distributed_c10d._get_default_group(); "
        "d.broadcast(torch.ones(2), 0)",
        r"broadcast[^$]*rank 1|ranks wait for each other[^$]*rank 1 waits",
    ),
}
"""What rank 1 does, and what the others must be told of it."""


@dataclass(frozen=True)
class Row:
    """One fault under one launcher."""

    fault: str
    door: str
    launcher: str
    seconds: float | None
    """From the fault until the job has ended; None: HUNG."""
    code: int | None
    named: bool
    """Whether what is printed names the rank and, where there is one, the line."""
    frames: int
    """How many lines of instep's own a traceback shows."""
    output: str

    def __str__(self) -> str:
        time_ = "HUNG" if self.seconds is None else f"{self.seconds:.1f} s, rc {self.code}"
        return f"{time_}, {'named' if self.named else 'NOT NAMED'}, {self.frames} frames"


def run(fault: str, door: str, launcher: str, folder: Path) -> Row:
    """Let it happen."""
    does, expected = FAULTS[fault]
    script = folder / "train.py"
    doors = {"explicit": EXPLICIT, "unedited": UNEDITED}
    script.write_text(SCRIPT.format(door=doors[door], fault=does))
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    moment = socket.socket(type=socket.SOCK_DGRAM)
    moment.bind(("127.0.0.1", 0))
    moment.settimeout(1.0)
    environ["MOMENT"] = str(moment.getsockname()[1])
    environ |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    python = [sys.executable, "-m", "instep"]
    with open(folder / "output", "wb") as output:
        jobs = [
            subprocess.Popen(
                command, env=environ | place, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )
            for command, place in (
                [([*python, "run", "-n", "2", str(script)], {})]
                if launcher == "instep run"
                else [([*python, str(script)], place) for place in _places()]
            )
        ]  # fmt: skip
        ended = _wait(jobs)
    text = (folder / "output").read_text(errors="replace")
    with moment:
        try:
            began = float(moment.recv(100))
        except TimeoutError:  # it ended before the fault
            began = float("nan")
    codes = [job.returncode for job in jobs]
    return Row(
        fault, door, launcher, None if ended is None else ended - began, max(codes, key=abs),
        re.search(expected, text) is not None, text.count("/src/instep/"), text,
    )  # fmt: skip


def _places() -> list[dict[str, str]]:
    port = str(free_port())
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [told | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def _wait(jobs: list[subprocess.Popen[bytes]]) -> float | None:
    """When all have ended; None when they had to be ended."""
    deadline = time.monotonic() + LIMIT
    try:
        for job in jobs:
            job.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        for job in jobs:
            job.kill()
            job.wait()
        return None
    return time.time()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--doors", nargs="+", default=["explicit", "unedited"])
    parser.add_argument("--launchers", nargs="+", default=["instep run", "two processes"])
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    for asked_for in itertools.product(asked.faults, asked.doors, asked.launchers):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows.append(run(*asked_for, Path(folder)))
        print(f"{', '.join(asked_for)}: {rows[-1]}", flush=True)
        if not rows[-1].named:
            print(rows[-1].output, flush=True)
    wrong = sum(not row.named for row in rows)
    print(f"{len(rows)} faults, {wrong} of them not named")
    if asked.json:
        told = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(asked.json).write_text(json.dumps(told, indent=2) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
