"""`instep run` on the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from instep.distributed.identity import endpoints
from instep.errors import CommandLineError
from instep.launch import supervisor
from instep.launch.environment import count_cores
from instep.launch.job import Job
from instep.launch.multihost.hosts import (
    ONE_NODE,
    NodeConfig,
    detect_nodes,
    parse_address,
    wrong_hosts,
)
from instep.launch.worker import static_opt_out
from instep.process import settings

RUN = """\
Run a script on N processes of this host, as `python script.py` would on one.

On several hosts, start it on each: `--nnodes 2 --node-rank K --master HOST:PORT`, or one task per
host by srun or mpirun, which say all that themselves.

The script may be one that was written for one process: every rank runs it, its calls of modules
are divided among them, and it sees, prints and writes what one process would. A script that uses
instep or torch.distributed itself runs as it is on every rank, as any script does with --plain,
and finds its place in the usual variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
When a rank fails, the others are stopped and its traceback is printed, once and last; the exit
code is that of the rank that failed first. Everything after the script's name belongs to the
script. `-m module` runs a module, as `python -m module` would.
"""
OUTPUT = """\
what becomes of the other ranks' output; rank 0 has this terminal. A rank of an unedited script
prints what rank 0 prints, so that nothing is heard of the others.
prefix (the default): each line, with the rank before it, like "[1] loss 0.5".
rank0: nothing, except the traceback of the rank that failed.
DIR: files rank0.out, rank0.err, rank1.out, ... in this directory, for every rank, rank 0 too"""

LOAD = """\
what each rank loads of every batch of an unedited script.
own (the default): its rows; what is random in a sample does not depend on who loads it.
whole: everything, with the random numbers of plain Python"""

_RANKS = ("-n", "-np", "--nproc", "--nproc-per-node", "--nproc_per_node")
"""The number of ranks, as other launchers call it too."""
_CROWDED = 2
"""Ranks for each core: with more, the start takes so long that a line says why."""
WITH_VALUE = (*_RANKS, "--output", "--load", "--nnodes", "--node-rank", "--master", "--dist-file")
"""Options that take the next word as their value."""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "run",
        help="run a script on several processes of this host",
        description=RUN,
        usage="instep run -n N [--plain] [--load own|whole] [--output prefix|rank0|DIR] "
        "[--nnodes M --node-rank K (--master HOST:PORT | --dist-file FILE)] "
        "(script.py | -m module) [args ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)
    parser.add_argument(
        *_RANKS, dest="n", type=_number_of_ranks, metavar="N", help="how many ranks on this host"
    )
    parser.add_argument("--plain", action="store_true", help="divide nothing of the script")
    parser.add_argument("--load", choices=("own", "whole"), help=LOAD)
    parser.add_argument("--output", default="prefix", metavar="prefix|rank0|DIR", help=OUTPUT)
    parser.add_argument(
        "--nnodes", type=int, metavar="M", help="how many hosts; 1 also inside srun or mpirun"
    )
    parser.add_argument("--node-rank", type=int, metavar="K", help="which of them this is, from 0")
    parser.add_argument(
        "--master", metavar="HOST:PORT", help="where they meet: an address of host 0, a free port"
    )
    parser.add_argument(
        "--dist-file", metavar="FILE", help="or where they meet: a new file that all of them see"
    )


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Do it and return the exit code. Raises LaunchError."""
    if asked.n is None:
        raise _no_number_of_ranks(program)
    load = {settings.LOAD.name: asked.load} if asked.load else {}
    job = Job(
        asked.n,
        tuple(program),
        asked.output,
        asked.plain,
        variables=lambda rank: load,
        hosts=_hosts(asked),
    )
    _mention_few_cores(asked.n)
    return supervisor.run_job(job, started=lambda: _mention_findings(job)).print_report()


def _no_number_of_ranks(program: Sequence[str]) -> CommandLineError:
    """There is no -n, or it stands behind the script's name, where it is the script's."""
    late = next((word for word in program[1:] if word in ("-n", "-np", "--nproc")), None)
    script = program[0] if program and program[0] != "-m" else "train.py"
    what = f"{late} comes before the script" if late else "say how many ranks"
    return CommandLineError(f"{what}: instep run -n 2 {script}")


def _hosts(asked: argparse.Namespace) -> NodeConfig:
    """What the options say, and where they do not, the launcher around this one."""
    if asked.nnodes == 1:
        return ONE_NODE
    if asked.nnodes is None and asked.node_rank is None:
        environ = dict(os.environ)
        if asked.dist_file:
            environ[settings.DIST_FILE.name] = asked.dist_file
        return detect_nodes(environ, asked.n)
    node, nodes = asked.node_rank, asked.nnodes
    if node is None or nodes is None or not 0 <= node < nodes:
        raise wrong_hosts(f"--node-rank {node} of --nnodes {nodes}")
    if asked.master:
        return NodeConfig(node, nodes, parse_address(asked.master))
    if asked.dist_file:
        return NodeConfig(node, nodes, endpoints.SharedFile(os.path.abspath(asked.dist_file)))
    raise wrong_hosts("the hosts need --master or --dist-file to meet")


def _mention_few_cores(ranks: int) -> None:
    """One line where it takes long until all ranks have started, as each imports torch."""
    count = count_cores()
    if ranks > _CROWDED * count:
        print(
            f"instep: starts {ranks} ranks on {count} core{'s' * (count != 1)}; they share the "
            "cores, so it takes a while until all of them are running.",
            file=sys.stderr,
            flush=True,
        )


def _mention_findings(job: Job) -> None:
    """One line where the script shows a severe mistake; read while the ranks start.

    What an unedited script does is done once.
    """
    if not job.plain and static_opt_out.find_opt_out(job.command) is None:
        return
    from instep.check.checker import find_errors  # costs what a start should not wait for

    script = job.command[0]
    findings = find_errors(script) if job.hosts.node == 0 else []
    if findings:
        named = dict.fromkeys(f"{finding.code} ({finding.name})" for finding in findings)
        codes = ", ".join(named)
        print(f"instep: {codes} in this script; see: instep check {script}", file=sys.stderr)


def _number_of_ranks(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise CommandLineError(
            f"-n takes the number of ranks, a whole number from 1 up, not {value!r}."
        ) from None
