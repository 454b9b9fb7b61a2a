"""Faults of a small training, and the jobs of three or four ranks in which they happen.

`fault_matrix.py` runs them. In the third step one rank does something else than the others.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import networks
from launching import LAUNCHER_VARIABLES

STALL_SECONDS = 2
"""INSTEP_STALL_SECONDS of the jobs."""
START_LIMIT = 60.0
"""Seconds from the start of a job until the fault."""
LIMIT, TORCHRUN_LIMIT = 40.0, 10.0
"""Seconds after the fault, after which nobody has named it. (Without instep the ranks of most jobs
wait for half an hour, until torch.distributed's own timeout.)"""
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
    moment = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    moment.sendto(repr(time.time()).encode(), os.environ["MOMENT"])
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
def evaluate():
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            together((model(x).argmax(1) == y).float().mean())
    model.train()
def nested(outer, inner):
    with instep.single_process_scope(outer) as here:
        if here or outer != inner:
            with instep.single_process_scope(inner) as there:
                if there and outer == inner:
                    time.sleep(100)
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
            time.sleep({pause})
        {after_epoch}
train()
"""


@dataclass(frozen=True)
class Fault:
    """What one rank does, and where."""

    before: str = "pass"
    """Code before the forward, in which `fails` is true on the culprit, in that step."""
    after: str = "pass"
    """Code after the optimizer's step."""
    after_epoch: str = "pass"
    data: str = ""
    """Code in the data set's __getitem__."""
    workers: int = 0
    culprit: int = 1
    waits: bool = False
    """Whether only waiting shows it: the stall threshold is allowed beside the 5 seconds."""
    line: str = r"train\.py(:|\", line )\d+"
    """What must be said beside the rank."""
    doors: tuple[str, ...] = ("explicit", "unedited", "ddp")
    is_cut: bool = False
    """Two hosts, of which the cable is pulled when the culprit has reached the step."""


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
    "if rank == 0 around evaluation": Fault("if fails and mine() == 0: evaluate()", culprit=0),
    "uneven data": Fault("if fails: break", after_epoch="together(torch.ones(2))", doors=CALLS),
    "another learning rate": Fault(
        "optimizer.param_groups[0]['lr'] = 0.2 if is_culprit and at['step'] >= STEP else 0.1",
        line=r"\blr\b",
    ),
    "a parameter changed": Fault(
        after="if fails: next(model.parameters()).data.add_(1)", line=r"0\.weight"
    ),
    "a run-once scope within another, that sleeps": Fault(
        "if at['step'] == STEP: nested(1, 1)", doors=("explicit",), waits=True
    ),
    "a run-once scope of another rank within one": Fault(
        "if at['step'] == STEP: nested(0, 1)", doors=("explicit",)
    ),
    "a run-once scope that one rank skips": Fault(
        "if at['step'] == STEP and not fails: nested(0, 0)", doors=("explicit",)
    ),
    "two hosts with the cable cut": Fault(culprit=2, waits=True, line=r"\bh1\b", is_cut=True),
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
    limit: float
    """Seconds after the fault at which the job was ended."""
    is_false_alarm: bool
    """Whether a stall was reported before the fault."""
    took: float
    """Seconds from the start to the end of the job."""
    output: str = ""
    """Of the job; empty in figures that are kept without it."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.fault, self.door, self.launcher

    @property
    def in_time(self) -> bool:
        return self.named is not None and self.named <= self.allowed

    def __str__(self) -> str:
        named = "NOT NAMED" if self.named is None else f"named after {self.named:.1f} s"
        ended = "" if self.ended is None else f", ended after {self.ended:.1f} s"
        late = "" if self.in_time else " (LATE)" if self.named is not None else ""
        alarm = ", a FALSE ALARM before" if self.is_false_alarm else ""
        return f"{named}{late}{ended}{alarm}; {self.took:.0f} s in all"


def run(name: str, door: str, launcher: str, folder: Path) -> Row:
    """Let it happen, and wait until it is named."""
    fault, started = FAULTS[name], time.time()
    (folder / "train.py").write_text(
        SCRIPT.format(
            door=DOORS[door], before=fault.before, after=fault.after, culprit=fault.culprit,
            after_epoch=fault.after_epoch, workers=fault.workers, in_data=bool(fault.data),
            data_fault=fault.data or "pass", pause=0.1 if fault.is_cut else 0,
        )
    )  # fmt: skip
    moment = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # also from another host
    moment.bind(str(folder / "moment"))
    moment.setblocking(False)
    output = folder / "output"
    limit = TORCHRUN_LIMIT if launcher == "torchrun" else LIMIT
    began = named = ended = None
    text, innocent = "", 0
    deadline = started + START_LIMIT
    with (
        moment,
        networks.TwoHosts() if fault.is_cut else nullcontext() as hosts,
        _job(folder, launcher, hosts) as jobs,
    ):
        while time.time() < deadline and named is None and ended is None:
            time.sleep(0.02)
            if began is None:
                innocent = len(text)
                with suppress(BlockingIOError):
                    began = float(moment.recv(100))
                    if hosts is not None:
                        hosts.cut()
                        began = time.time()
                    deadline = began + limit
            if all(job.poll() is not None for job in jobs):
                ended = time.time()
            text = output.read_text(errors="replace")
            if began is not None and _names(text[innocent:], fault, launcher):
                named = time.time()
    text = output.read_text(errors="replace")
    since = began if began is not None else float("nan")
    return Row(
        name, door, launcher, None if named is None else named - since,
        None if ended is None else ended - since, 5.0 + (STALL_SECONDS if fault.waits else 0),
        limit, " waits in " in text[:innocent], time.time() - started, text,
    )  # fmt: skip


def _names(text: str, fault: Fault, launcher: str) -> bool:
    """Whether one clause names the culprit and its line, or a failure of it has the line."""
    rank = rf"\branks? (\d+(-\d+)?, )*{fault.culprit}\b"
    if launcher == "torchrun":  # "[rank1]:" before a traceback, or "rank : 1" in its table
        found = re.search(rf"\brank[ :]*{fault.culprit}\b", text), re.search(fault.line, text)
        return all(found)
    clauses = re.split(r"[;\n]", text)
    if any(re.search(rank, clause) and re.search(fault.line, clause) for clause in clauses):
        return True
    # A comparison of the ranks: its line is that of the traceback, at which they were compared.
    if re.search(rf"DriftError: .*{rank}", text) and re.search(fault.line, text):
        return True
    failure = re.search(rf"instep: rank {fault.culprit} of \d+ ", text)
    return failure is not None and re.search(fault.line, text[failure.start() :]) is not None


@contextmanager
def _job(
    folder: Path, launcher: str, hosts: networks.TwoHosts | None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    environ |= {
        "MOMENT": str(folder / "moment"), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder),
        "INSTEP_STALL_SECONDS": str(STALL_SECONDS), "INSTEP_DRIFT_STEPS": "5",
        "INSTEP_TIMEOUT": "60", "INSTEP_DIVIDE": "always",
    }  # fmt: skip
    if launcher in BACKENDS:
        environ["INSTEP_BACKEND"] = BACKENDS[launcher]
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("wb"))
        jobs = [
            subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )
            for command in _commands(str(folder / "train.py"), launcher, hosts)
        ]  # fmt: skip
        for job in jobs:
            stack.callback(_end, job)
        yield jobs


def _commands(script: str, launcher: str, hosts: networks.TwoHosts | None) -> list[list[str]]:
    instep = [sys.executable, "-m", "instep", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if hosts is None:
        ours = [*instep, "-n", "3", script]
        return [
            [*torchrun, "--standalone", "--nproc-per-node", "3", script]
            if launcher == "torchrun"
            else ours
        ]
    first = hosts.addresses[0]
    commands = []
    for host in range(2):
        nodes = ["--nnodes", "2", "--node-rank", str(host)]
        command = [*instep, "-n", "2", *nodes, "--master", f"{first}:29471", script]
        if launcher == "torchrun":
            master = ["--master-addr", first, "--master-port", "29472"]
            command = [*torchrun, "--nproc-per-node", "2", *nodes, *master, script]
        commands.append(hosts.on(host, *command))
    return commands


def _end(job: subprocess.Popen[bytes]) -> None:
    """Kill all of its processes."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    job.kill()
    job.wait()
