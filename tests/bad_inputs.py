"""Wrong command lines, variables and files, and what `instep` says to each.

    python tests/bad_inputs.py --json bad_inputs.json

Every case has to end by itself, with the exit code that is expected, in a sentence that says what
is wrong: no traceback of instep's, and no silence.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from instep import cli
from launching import LAUNCHER_VARIABLES
from machine import machine

LIMIT = 100.0
"""Seconds, after which a case counts as HUNG."""


@dataclass(frozen=True)
class Case:
    """One thing that is wrong, or only looks so."""

    words: str
    """What stands behind `instep`, in a shell."""
    said: str
    """What has to be in the output."""
    code: int = 2
    environ: dict[str, str] = field(default_factory=dict)
    slow: bool = False
    """Not tried by `make test`: it starts ranks, or a faster test shows the same."""

    @property
    def name(self) -> str:
        """As a user would type it."""
        return " ".join([*(f"{k}={v[:20]}" for k, v in self.environ.items()), "instep", self.words])


_QUICK = ("INSTEP_TIMEOUT", "INSTEP_BACKND")


def _variable(name: str, value: str, said: str) -> Case:
    return Case("run -n 1 train.py", said, environ={name: value}, slow=name not in _QUICK)


CASES = (
    _variable("INSTEP_DEVICE", "foo", "INSTEP_DEVICE takes auto or cpu, not 'foo'"),
    _variable("INSTEP_LOAD", "foo", "INSTEP_LOAD takes auto, own or whole, not 'foo'"),
    _variable("INSTEP_WATCH", "maybe", "INSTEP_WATCH takes on or off, not 'maybe'"),
    _variable("INSTEP_BACKEND", "mpi", "INSTEP_BACKEND takes auto, gloo or shm, not 'mpi'"),
    _variable("INSTEP_BUCKET_MIB", "-1", "INSTEP_BUCKET_MIB takes a whole number from 0"),
    _variable("INSTEP_TIMEOUT", "0", "INSTEP_TIMEOUT takes a whole number from 1"),
    _variable("INSTEP_TIMEOUT", "9" * 30, "INSTEP_TIMEOUT takes a whole number from 1"),
    _variable("INSTEP_ARRIVAL_NOTICE", "soon", "INSTEP_ARRIVAL_NOTICE takes a whole number"),
    _variable("INSTEP_SEED", "-1", "INSTEP_SEED takes a whole number from 0 to 4294967295"),
    _variable("INSTEP_BACKND", "gloo", "Did you mean INSTEP_BACKEND?"),
    Case("env", "INSTEP_WATCH takes on or off", environ={"INSTEP_WATCH": "maybe"}),
    Case("verify -n 2 train.py", "Did you mean INSTEP_SEED?", environ={"INSTEP_SED": "1"}),
    Case(
        "env",
        "MASTER_PORT takes a port from 1 to 65535, not '70000'",
        environ={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "70000"},
        slow=True,
    ),
    Case("", "usage: instep", 0),
    Case("help", "usage: instep", 0),
    Case("--version", "instep 0", 0),
    Case(
        "runn -n 2 train.py",
        "no command of instep's, and there is no such script. Did you mean run",
    ),
    Case("trian.py", "there is no such script. Did you mean train.py?"),
    Case("run train.py -n 2", "-n comes before the script: instep run -n 2 train.py"),
    Case(
        "run train.py --nproc=4 -x", "--nproc comes before the script: instep run -n 4 train.py -x"
    ),
    Case(
        "run --nnodes 2 --node-rank 0 train.py x",
        "say how many ranks each host has: instep run -n 4 … train.py x",
        environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    ),
    Case("run --nnodes 2 -n 1 train.py", "--node-rank is missing. On every host: instep run"),
    Case("run --node-rank 1 -n 1 train.py", "--nnodes is missing. On every host: instep run"),
    Case("run -n two train.py", "-n takes the number of ranks, a whole number from 1 up"),
    Case("run -n train.py", "-n is without its value, and train.py stands in its place."),
    Case("run -n 2 --checkpoint= train.py", "the value of --checkpoint is empty. Is a shell"),
    Case("run -n 2 --output '' train.py", "the value of --output is empty"),
    Case("check --json=train.py train.py", "--json is without its value, and train.py stands"),
    Case("run -n 2 --output train.py 3", "Write --output prefix|rank0|DIR train.py"),
    Case("run -n 2 --timeline trian.py", "--timeline is without its value, and trian.py stands"),
    Case("verify -n 1,2 --json train.py --lr 1", "Write --json FILE train.py"),
    Case("check --json train.py train.py", "--json is without its value, and train.py stands"),
    Case("horovodrun -np 2 --timeline-filename python train.py", "Write --timeline-filename FILE"),
    Case("horovodrun --host-discovery-script train.py -np 2 --min-np 2", "nothing to run"),
    Case("run -n 0 train.py", "a whole number from 1 up, not '0'"),
    Case("run -n 0 --bitwise 8 train.py", "a whole number from 1 up, not '0'"),
    Case("run -n 2", "nothing to run: name a script.py, or -m and a module"),
    Case("run -n 2 trian.py", "there is no such file. Did you mean train.py?"),
    Case("run 2 train.py", "there is no such file. If a number of ranks is meant, write -n 2"),
    Case("run -n 2 package/trian.py", "Did you mean package/train.py?"),
    Case("run -n 2 -m train.py", "Leave -m out, or write -m train."),
    Case("-n 2 train.py", "run is missing: instep run -n 2 train.py"),
    Case("python train.py x", "leave python out: instep run -n 2 train.py x"),
    Case("package.train x", "If the module is meant: instep run -n 2 -m package.train x"),
    Case("version", "Did you mean --version?"),
    Case("--verison", "did you mean --version?"),
    Case("verify train.py", "say at which numbers of ranks: instep verify -n 1,2 train.py"),
    Case("verify -n two train.py", "-n takes numbers of ranks such as 1,2,3, not 'two'"),
    Case("verify -n 1,2 --step 20 train.py", "did you mean --steps?"),
    Case("check", "no script given: instep check train.py"),
    Case("check trian.py", "trian.py: No such file or directory"),
    Case("check --selct INS1 train.py", "did you mean --select?"),
    Case("check --select XYZ train.py", "no rule begins with 'XYZ'"),
    Case("check --explain INS999", "there is no rule 'INS999'. Each finding"),
    Case(
        "slurm train.py",
        "instep slurm --gpus-per-node 4 train.py; with other accelerators, --gres npu:8; without",
    ),
    Case("slurm --gpus-per-nod 4 train.py", "did you mean --gpus-per-node?"),
    Case(
        "k8s --image i --tasks-per-node 2 --name 训练 train.py",
        "argument --name: takes small letters, digits and hyphens, 63 at most, not '训练'",
    ),
    Case("run -np 2 train.py", "trained", 0, slow=True),
    Case("run --nproc 2 train.py", "trained", 0, slow=True),
    Case("run -n 2 --pllain train.py", "did you mean --plain?"),
    Case("run --num_processes 2 train.py", "The number of ranks is -n."),
    Case("run --standalone --nproc_per_node=2 train.py", "Leave it out: without --nnodes"),
    Case("run -n 2 --master_addr a train.py", "host 0 is --master HOST:PORT."),
    Case("run -n 2 torchrun train.py", "Leave torchrun out: instep run starts the ranks itself."),
    Case("run -n 2 'train.py --lr 1'", "there is no such file. Leave the quotes out: train.py --"),
    Case("verify train.py -n 1,2", "-n comes before the script: instep verify -n 1,2 train.py"),
    Case("env -n 2", "It is started as a script is: instep run -n 2 -m instep env."),
    Case("run -n 2 python train.py", "Leave python out"),
    Case("run -n 2 package.train", "write -m package.train"),
    Case("run -n 2 note.ipynb", "it is a notebook"),
    Case("note.ipynb", "it is a notebook"),
    Case("run -n 2 package", "package: it is a directory. Name a Python script."),
    Case("run -n 2 program", "program: it is a directory. Name program/__main__.py."),
    Case("run -n 2 program.zip", "it is a zip archive. Unpack it, and name its __main__.py."),
    Case("run -n 1 /dev/zero", "it is no ordinary file"),
    Case("run -n 1 pipe.py", "it is no ordinary file"),
    Case("run -n 1 deep.py", "MemoryError", 1, slow=True),
    Case("run -n 1 called.py", "RecursionError: maximum recursion depth", 1, slow=True),
    Case("run -n 1 latin.py", "trained", 0, slow=True),
    Case("run -n 1 raises.py 2>&-", "begun", 1, slow=True),
    Case("run -n 1 --output full raises.py", "rank 0 of 1 failed", 1, slow=True),
    Case("run -n 5 train.py", "trained", 0, slow=True),
    Case("check .", "Nothing found in 6 files"),
    Case("check package", "Nothing found in 1 file.", 0),
    Case("check empty", "there is no Python file in empty"),
    Case("check pipe.py", "pipe.py: it is no ordinary file"),
    Case("check /dev/zero", "/dev/zero: it is no ordinary file"),
    Case("check latin.py", "Nothing found in 1 file.", 0),
    Case("check cookie.py", "unknown encoding"),
    Case("check called.py", "Nothing found in 1 file.", 0),
    Case("check deep.py", "nested too deeply"),
    Case("check --json /no/such/x train.py", "cannot write /no/such/x: No such file"),
    Case("check --json /dev/full train.py", "cannot write /dev/full: No space left"),
)


def prepare(folder: Path) -> None:
    """The files that the cases speak of."""
    for name in ("package", "program", "empty", "full"):
        (folder / name).mkdir()
    for name in ("train.py", "package/train.py", "program/__main__.py"):
        (folder / name).write_text("print('trained')\n")
    (folder / "raises.py").write_text("print('begun')\nraise ValueError('boo')\n")
    (folder / "note.ipynb").write_text('{"cells": null}\n')
    (folder / "latin.py").write_bytes(
        "# coding: latin-1\nprint('trained', 'é')\n".encode("latin-1")
    )
    (folder / "cookie.py").write_text("# coding: nonsense\n")
    (folder / "deep.py").write_text("x = " + "-" * 30000 + "1\n")
    called = [f"def f{k}(): return f{k - 1}()" for k in range(1, 3000)]
    (folder / "called.py").write_text("\n".join(["def f0(): pass", *called, "f2999()", ""]))
    os.mkfifo(folder / "pipe.py")
    with ZipFile(folder / "program.zip", "w") as archive:
        archive.writestr("__main__.py", "print('trained')\n")
    for name in ("rank0.out", "rank0.err"):
        (folder / "full" / name).symlink_to("/dev/full")


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    case: str
    verdict: str
    """`as expected`, or what was otherwise."""
    output: str


def attempt(case: Case, folder: Path) -> Outcome:
    """Do it in this folder, which was prepared."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    try:
        ended = subprocess.run(
            ["/bin/sh", "-c", f'exec "{sys.executable}" -m instep {case.words}'],
            env=environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"} | case.environ,
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(case.name, "HUNG", "")
    output = ended.stdout + ended.stderr
    return Outcome(case.name, _verdict(case, ended.returncode, output), output)


def attempt_here(case: Case) -> Outcome:
    """Do it in this process, whose working directory was prepared; nothing may start ranks."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code = cli.main(shlex.split(case.words))
        except SystemExit as ended:  # --help, --version
            code = ended.code if isinstance(ended.code, int) else 1
    return Outcome(case.name, _verdict(case, code, output.getvalue()), output.getvalue())


def _verdict(case: Case, code: int, output: str) -> str:
    if code != case.code:
        return f"exit code {code}, not {case.code}"
    if case.said not in output:
        return f"does not say {case.said!r}"
    return "a traceback" if case.code == 2 and "Traceback" in output else "as expected"


def main(words: Sequence[str] | None = None) -> int:
    """Try every case and print the table; the exit code is 1 where any is not as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as name:
        prepare(Path(name))
        outcomes = []
        for case in CASES:
            outcomes.append(attempt(case, Path(name)))
            print(f"{outcomes[-1].case:70} {outcomes[-1].verdict}", flush=True)
    wrong = [outcome for outcome in outcomes if outcome.verdict != "as expected"]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} as expected")
    if asked.json:
        told = {"machine": machine(), "cases": [asdict(outcome) for outcome in outcomes]}
        Path(asked.json).write_text(json.dumps(told, indent=2) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
