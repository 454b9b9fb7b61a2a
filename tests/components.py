"""The real launchers that tests need, and what is to be done where one is not there.

`@components.needs("Slurm")` marks a test. conftest.py skips it where the component is missing, and
says so at the end of the run; under CI (the variable CI is set) the test fails instead.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1] / ".venv-peers" / "bin"
PATH = os.environ["PATH"] + ":/usr/sbin"
PROGRAMS = {
    "Open MPI": ("mpirun.openmpi",),
    "MPICH": ("mpirun.mpich",),
    "Slurm": ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo"),
    "Horovod": (str(PEERS / "horovodrun"),),  # by scripts/horovod, never under CI
    "network namespaces": ("ip", "unshare"),
    "zsh": ("zsh",),
    "fish": ("fish",),
    "C++": ("g++",),  # simulated_streams.cpp, and what setup.py compiles
    "ssh": ("ssh", "sshd", "ssh-keygen"),
}
HEADER = Path(sysconfig.get_path("include"), "Python.h")
"""Which "C++" needs, too: Debian has it in a package of its own."""
ROOT_ONLY = ("Slurm", "network namespaces")


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that starts these for real."""
    assert PROGRAMS.keys() >= set(names)
    return pytest.mark.needs(*names)


def missing(name: str) -> str | None:
    """Why this component cannot be used here, if so."""
    absent = [program for program in PROGRAMS[name] if shutil.which(program, path=PATH) is None]
    if absent:
        return f"{name} is not installed ({', '.join(absent)} not found)"
    if name == "C++" and not HEADER.exists():
        return f"Python's headers are not installed ({HEADER} not found)"
    if name in ROOT_ONLY and os.getuid() != 0:
        return f"{name} of the tests' own needs root"
    return None


def require(names: tuple[str, ...]) -> None:
    """Skip the running test where a component is missing; fail it under CI."""
    for why in filter(None, map(missing, names)):
        if os.environ.get("CI"):
            pytest.fail(f"{why}, and CI is set: there no test is skipped for that", pytrace=False)
        pytest.skip(why)
