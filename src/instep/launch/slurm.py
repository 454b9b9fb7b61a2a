"""`instep slurm`: a batch script for a job of one rank per GPU (or other accelerator) or core."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import CommandLineError
from instep.launch.job import check_command, parse_count
from instep.process import python_command
from instep.process.exit_status import REQUEUE

SLURM = """\
Print a Slurm batch script that runs a script on one rank per GPU or core, or submit it.

    instep slurm --nodes 2 --gpus-per-node 4 --time 12:00:00 train.py --epochs 90 > job.sh
    instep slurm --nodes 2 --gres npu:8 train.py
    instep slurm --nodes 2 --tasks-per-node 16 --set partition=cpu --submit train.py

Each rank writes to a file of its own. Every rank gets SIGTERM before the time limit, so that the
script can save a checkpoint.
"""
SIGNAL_HELP = "send SIGTERM to the ranks so long before the limit; 0: never (default: 120)"
REQUEUE_HELP = """\
queue the job again if that SIGTERM ended it; the script must resume by itself, as it does with
instep.Checkpoint, or unedited where INSTEP_CHECKPOINT names a folder"""
GRES_HELP = """\
accelerators on each host by their name in this cluster, as in npu:8; one rank for each"""
SET_HELP = "any other option of sbatch, such as partition=gpu; may be repeated"


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "slurm",
        help="print or submit a batch script for Slurm",
        description=SLURM,
        usage="instep slurm [--nodes N] (--gpus-per-node G | --gres TYPE:G | --tasks-per-node T) "
        "[options] "
        "(script.py | -m module) [args ...]",
    )
    add = parser.add_argument
    add("--nodes", type=parse_count, default=1, metavar="N", help="hosts (default: 1)")
    per_node = parser.add_mutually_exclusive_group()
    per_node.add_argument(
        "--gpus-per-node",
        type=parse_count,
        metavar="G",
        help="GPUs on each host; one rank for each GPU",
    )
    per_node.add_argument("--gres", type=_gres, metavar="TYPE:G", help=GRES_HELP)
    per_node.add_argument(
        "--tasks-per-node",
        type=parse_count,
        metavar="T",
        help="ranks on each host if there are no GPUs",
    )
    add("--cpus-per-task", type=parse_count, metavar="C", help="cores for each rank")
    add("--time", metavar="LIMIT", help="the time limit, as in 1-12:00:00")
    add("--signal", type=int, default=120, metavar="SECONDS", help=SIGNAL_HELP)
    add("--requeue-at-limit", action="store_true", help=REQUEUE_HELP)
    add("--name", metavar="NAME", help="the job's name (default: the script's)")
    add(
        "--output",
        default="logs",
        metavar="DIR",
        help="folder for the ranks' output (default: logs)",
    )
    add("--set", action="append", default=[], metavar="OPTION", help=SET_HELP)
    add("--submit", action="store_true", help="submit it with sbatch instead of printing it")


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Print or submit the batch script. Raises CommandLineError."""
    command = tuple(program)
    check_command(command)
    ranks = asked.gpus_per_node or asked.tasks_per_node
    if asked.gres is not None:
        ranks = parse_count(asked.gres.rpartition(":")[2])
    if ranks is None:
        raise _no_size(command)
    name = command[1] if command[0] == "-m" else Path(command[0]).stem
    text = format_script(
        Batch(
            tuple(python_command()),
            command,
            name=asked.name or name,
            nodes=asked.nodes,
            tasks=ranks,
            gpus=asked.gpus_per_node is not None,
            gres=asked.gres,
            cpus=asked.cpus_per_task,
            time=asked.time,
            signal=asked.signal,
            requeue=asked.requeue_at_limit,
            output=asked.output,
            extra_options=tuple(asked.set),
        )
    )
    if not asked.submit:
        print(text, end="")
        return 0
    try:
        return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode
    except FileNotFoundError:
        raise CommandLineError(
            "--submit needs sbatch, which is not here. Submit from a login node."
        ) from None


def _no_size(program: Sequence[str]) -> CommandLineError:
    line = shlex.join(program)
    return CommandLineError(
        f"say how many ranks each host has: instep slurm --gpus-per-node 4 {line}; "
        "with other accelerators, --gres npu:8; without any, --tasks-per-node 16."
    )


def _gres(value: str) -> str:
    kind, _, count = value.rpartition(":")
    if not kind:
        raise argparse.ArgumentTypeError(f"takes a type and a number, as in npu:8, not {value!r}")
    parse_count(count)
    return value


# ------------------------------------------------------------------- the batch script (pure)

ENDED_BY_SIGTERM = 128 + 15


@dataclass(frozen=True)
class Batch:
    """The options of a Slurm job, and its program."""

    python: tuple[str, ...]
    """The interpreter, on every node, and its options."""
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
    gres: str | None = None
    """The accelerators of each host as Slurm's generic resources: npu:8."""
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
        *([f"gres={batch.gres}"] if batch.gres else []),
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
    command = shlex.join([*batch.python, "-m", "instep", *batch.program])
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
        "# At the time limit: go on in a new turn.",
        f"if [ $code -eq {ENDED_BY_SIGTERM} ] || [ $code -eq {REQUEUE} ]; then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
