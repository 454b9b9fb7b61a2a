"""Ranks get out of step in a real job of three ranks: who is named, with which line, and how soon.

    python tests/fault_matrix.py --json matrix.json

A small training runs by explicit calls, unedited, and with plain DDP, over shared memory and over
Gloo; the same faults on plain DDP under torchrun stand beside them. In the third step one rank does
something else than the others. A fault is named when the output names that rank and a line of the
script.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from launching import LAUNCHER_VARIABLES
from machine import machine

STALL_SECONDS = 2
"""INSTEP_STALL_SECONDS of the jobs."""
LIMIT = 40.0
"""Seconds after the fault, after which nobody has named it."""
EXPLICIT = """
import instep
def mine():
    return instep.rank
def together(tensor):
    return instep.all_reduce(tensor)
def copied(tensor):
    return instep.broadcast(tensor)
def prepared(model, loader):
    return instep.replicate(model), instep.shard(loader)
"""
UNEDITED = """
def mine():
    return int(open("/proc/self/environ").read().split("\\0RANK=")[1].split("\\0")[0])
def together(tensor):
    return tensor
copied = together
def prepared(model, loader):
    return model, loader
"""
DDP = """
import torch.distributed as dist
if "INSTEP_BACKEND" in os.environ:
    import instep.shm
    dist.init_process_group("instep")
else:
    dist.init_process_group()
def mine():
    return dist.get_rank()
def together(tensor):
    dist.all_reduce(tensor)
    return tensor
def copied(tensor):
    dist.broadcast(tensor, 0)
    return tensor
def prepared(model, loader):
    from torch.utils.data import DataLoader, DistributedSampler
    sampler = DistributedSampler(loader.dataset)
    loader = DataLoader(loader.dataset, 4, sampler=sampler, num_workers=loader.num_workers)
    return torch.nn.parallel.DistributedDataParallel(model), loader
"""
SCRIPT = """
import ctypes, os, signal, socket, sys, threading, time, torch
{door}
STEP, CULPRIT = 3, {culprit}
def begin():
    where = ("127.0.0.1", int(os.environ["MOMENT"]))
    socket.socket(type=socket.SOCK_DGRAM).sendto(repr(time.time()).encode(), where)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 120
    def __getitem__(self, k):
        if {in_data} and at["step"] == STEP and is_culprit:
            begin()
            {data_fault}
        return torch.full((8,), float(k)).sin(), k % 4
class Shared(dict):
    "The step, which loader workers see."
    def __init__(self):
        self.memory = torch.zeros(1, dtype=torch.int64).share_memory_()
    def __getitem__(self, name):
        return int(self.memory[0])
    def __setitem__(self, name, value):
        self.memory[0] = value
at, is_culprit = Shared(), mine() == CULPRIT
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
loader = torch.utils.data.DataLoader(Data(), 12, num_workers={workers})
model, loader = prepared(model, loader)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
lock = threading.Lock()
def train():
    for epoch in range(100):
        for x, y in loader:
            at["step"] = at["step"] + 1
            fails = is_culprit and at["step"] == STEP
            if fails and not {in_data}:
                begin()
            {before}
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            {after}
train()
"""


@dataclass(frozen=True)
class Fault:
    """What one rank does, and where."""

    before: str = "pass"
    """Code before the forward, in which `fails` is true on the culprit, in that step."""
    after: str = "pass"
    data: str = ""
    """Code in the data set's __getitem__."""
    workers: int = 0
    culprit: int = 1
    waits: bool = False
    """Whether only waiting shows it: the stall threshold is allowed beside the 5 seconds."""
    line: str = r"train\.py(:|\", line )\d+"
    """What must be said beside the rank."""
    doors: tuple[str, ...] = ("explicit", "unedited", "ddp")


CALLS = ("explicit", "ddp")
"""The doors of scripts that call collectives themselves."""
FAULTS: dict[str, Fault] = {
    "a collective skipped": Fault("if not fails: together(torch.ones(4))", doors=CALLS),
    "one too many": Fault("if fails: together(torch.ones(4))", doors=CALLS),
    "another shape": Fault("together(torch.ones(5 if fails else 4))", doors=CALLS),
    "another dtype": Fault(
        "together(torch.ones(4, dtype=torch.float64 if fails else torch.float32))", doors=CALLS
    ),
    "another operation": Fault("(copied if fails else together)(torch.ones(4))", doors=CALLS),
    "another order": Fault(
        "[f(torch.ones(4)) for f in ((copied, together) if fails else (together, copied))]",
        doors=CALLS,
    ),
    "return": Fault("if fails: return"),
    "sys.exit(0)": Fault("if fails: sys.exit(0)"),
    "an exception": Fault("if fails: raise ValueError('boo')"),
    "an exception that is caught, the step skipped": Fault("if fails: continue"),
    "a slow loader": Fault(data="time.sleep(100)", waits=True),
    "a slow loader's worker": Fault(data="time.sleep(100)", workers=1, waits=True),
    "a loader's worker that dies": Fault(data="os._exit(1)", workers=1),
    "SIGSTOP": Fault("if fails: os.kill(os.getpid(), signal.SIGSTOP)", waits=True),
    "SIGKILL": Fault("if fails: os.kill(os.getpid(), signal.SIGKILL)"),
    "sleep": Fault("if fails: time.sleep(100)", waits=True),
    "an endless loop": Fault("while fails: pass", waits=True),
    "a lock": Fault("if fails: lock.acquire(); lock.acquire()", waits=True),
    "C code with the interpreter lock": Fault(
        "if fails: ctypes.PyDLL(None).sleep(100)", waits=True
    ),
    "if rank == 0 around a collective": Fault(
        "if at['step'] != STEP or mine() == 0: together(torch.ones(4))", culprit=0, doors=CALLS
    ),
    "if rank == 0 around model(x)": Fault(
        "if at['step'] == STEP and mine() == 0: model(x).sum().backward()", culprit=0, doors=CALLS
    ),
    "uneven data": Fault("if fails: break", doors=CALLS),
    "another learning rate": Fault(
        "optimizer.param_groups[0]['lr'] = 0.2 if is_culprit and at['step'] >= STEP else 0.1",
        line=r"\blr\b",
    ),
    "a parameter changed": Fault(
        after="if fails: next(model.parameters()).data.add_(1)", line=r"0\.weight"
    ),
}
DOORS = {"explicit": EXPLICIT, "unedited": UNEDITED, "ddp": DDP}
BACKENDS = {"shared memory": "shm", "Gloo": "gloo"}
LAUNCHERS = (*BACKENDS, "torchrun")
"""Two ways of `instep run`, and DDP without instep."""


@dataclass(frozen=True)
class Row:
    """One fault in one job."""

    fault: str
    door: str
    launcher: str
    named: float | None
    """Seconds from the fault until it was named; None: never."""
    ended: float | None
    """Seconds from the fault until the job ended by itself; None: it did not, or was ended."""
    allowed: float
    output: str

    @property
    def in_time(self) -> bool:
        return self.named is not None and self.named <= self.allowed

    def __str__(self) -> str:
        named = "NOT NAMED" if self.named is None else f"named after {self.named:.1f} s"
        ended = "" if self.ended is None else f", ended after {self.ended:.1f} s"
        return f"{named}{ended}{'' if self.in_time else ' (LATE)' if self.named else ''}"


def run(name: str, door: str, launcher: str, folder: Path) -> Row:
    """Let it happen, and wait until it is named."""
    fault = FAULTS[name]
    script = folder / "train.py"
    script.write_text(
        SCRIPT.format(
            door=DOORS[door], before=fault.before, after=fault.after, culprit=fault.culprit,
            workers=fault.workers, in_data=bool(fault.data), data_fault=fault.data or "pass",
        )
    )  # fmt: skip
    moment = socket.socket(type=socket.SOCK_DGRAM)
    moment.bind(("127.0.0.1", 0))
    moment.setblocking(False)
    with moment, _job(script, launcher, moment.getsockname()[1]) as (job, output):
        began = named = ended = None
        deadline = time.time() + LIMIT + 60
        while time.time() < deadline and named is None and ended is None:
            time.sleep(0.05)
            if began is None:
                with suppress(BlockingIOError):
                    began = float(moment.recv(100))
                    deadline = began + LIMIT
            if job.poll() is not None:
                ended = time.time()
            text = output.read_text(errors="replace")
            if _names(text, fault):
                named = time.time()
        text = output.read_text(errors="replace")
    since = began if began is not None else float("nan")
    allowed = 5.0 + (STALL_SECONDS if fault.waits else 0)
    return Row(
        name, door, launcher, None if named is None else named - since,
        None if ended is None else ended - since, allowed, text,
    )  # fmt: skip


def _names(text: str, fault: Fault) -> bool:
    """Whether the output names the culprit and its line."""
    ranks = re.search(rf"\branks? (\d+(-\d+)?, )*{fault.culprit}\b", text)
    return ranks is not None and re.search(fault.line, text) is not None


@contextmanager
def _job(
    script: Path, launcher: str, moment: int
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    environ |= {
        "MOMENT": str(moment), "OMP_NUM_THREADS": "1", "TMPDIR": str(script.parent),
        "INSTEP_STALL_SECONDS": str(STALL_SECONDS), "INSTEP_DRIFT_STEPS": "5",
        "INSTEP_TIMEOUT": "60", "INSTEP_DIVIDE": "always",
    }  # fmt: skip
    if launcher in BACKENDS:
        environ["INSTEP_BACKEND"] = BACKENDS[launcher]
    command = [sys.executable, "-m", "instep", "run", "-n", "3", str(script)]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", "3", str(script)]
    path = script.parent / "output"
    with path.open("wb") as output:
        job = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield job, path
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(job.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        job.kill()
        job.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=LAUNCHERS)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    for name, door, launcher in itertools.product(asked.faults, asked.doors, asked.launchers):
        if door not in FAULTS[name].doors or (launcher == "torchrun" and door != "ddp"):
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows.append(run(name, door, launcher, Path(folder)))
        print(f"{name}, {door}, {launcher}: {rows[-1]}", flush=True)
        if not rows[-1].in_time and launcher != "torchrun":
            print(rows[-1].output, flush=True)
    for launcher in asked.launchers:
        of = [row for row in rows if row.launcher == launcher]
        named = sum(row.in_time for row in of)
        print(f"{launcher}: {named} of {len(of)} faults named in time")
    if asked.json:
        told = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(asked.json).write_text(json.dumps(told, indent=2) + "\n")
    return int(any(not row.in_time for row in rows if row.launcher != "torchrun"))


if __name__ == "__main__":
    sys.exit(main())
