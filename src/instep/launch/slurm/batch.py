"""The batch script (pure)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

ENDED_BY_SIGTERM = 128 + 15


@dataclass(frozen=True)
class Batch:
    """The options of a Slurm job, and its program."""

    python: str
    """The interpreter, on every node."""
    program: tuple[str, ...]
    """`script.py args…` or `-m module args…`."""
    name: str
    """The job's name."""
    nodes: int = 1
    """Number of hosts."""
    tasks: int = 1
    """Number of ranks on each host."""
    gpus: bool = False
    """Whether each rank has a GPU."""
    cpus: int | None = None
    """Cores for each rank; None: the cluster's default."""
    time: str | None = None
    """The time limit in Slurm's format: 1-12:00:00."""
    signal: int = 120
    """Seconds before the limit at which the ranks get SIGTERM; 0: never."""
    requeue: bool = False
    """Whether a job that this SIGTERM ended is queued again."""
    output: str = "logs"
    """The folder for one file per rank."""
    extra_options: tuple[str, ...] = ()
    """Further options of sbatch, such as `partition=gpu`."""


def format_script(batch: Batch) -> str:
    """The text of a script for sbatch: options, one srun, and the handling of its exit code."""
    options = [
        f"job-name={batch.name}",
        f"nodes={batch.nodes}",
        f"ntasks-per-node={batch.tasks}",
        *([f"gpus-per-node={batch.tasks}"] if batch.gpus else []),
        *([f"cpus-per-task={batch.cpus}"] if batch.cpus else []),
        *([f"time={batch.time}"] if batch.time else []),
        *([f"signal=TERM@{batch.signal}"] if batch.signal else []),
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
        *batch.extra_options,
    ]
    files = shlex.quote(batch.output)
    output = shlex.quote(f"{batch.output}/%j-%t.out")
    command = shlex.join([batch.python, "-m", "instep", *batch.program])
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH --{option}" for option in options),
        "",
        f"mkdir -p {files}",
        f"srun --output={output} \\",
        f"    {command}",
        "code=$?",
        *(_requeue_lines() if batch.requeue else []),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _requeue_lines() -> list[str]:
    return [
        f"if [ $code -eq {ENDED_BY_SIGTERM} ]; then  # at the time limit: go on in a new turn",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
