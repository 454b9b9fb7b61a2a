"""`instep run` on the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from instep.distributed.identity import endpoints, launchers
from instep.errors import CommandLineError
from instep.launch.default_ranks import RANKS, choose_number_of_ranks
from instep.launch.job import Job, check_command, check_size, wrong_size
from instep.launch.multi_node.hosts import (
    ONE_NODE,
    NodeConfig,
    detect_nodes,
    parse_address,
    wrong_hosts,
)
from instep.launch.ranks.rank_variables import count_cores
from instep.launch.remote.host_slots import parse_hosts
from instep.launch.remote.remote_job import RemoteOptions, run_on_hosts
from instep.launch.restarts.attempts import run_attempts
from instep.launch.restarts.policy import RestartPolicy
from instep.launch.worker import static_opt_out
from instep.process import print_line, settings
from instep.unedited import bitwise

RUN = """\
Run a script on N processes (ranks) of this host, as `python script.py` runs it on one.

    instep run -n 4 train.py --lr 0.1
    instep run -n 4 --checkpoint runs/first train.py
    instep run --hosts a:4,b:4 train.py

A script that was written for one process needs no change. Every rank runs it, each call of a
module is divided among the ranks, and the script sees, prints and writes what one process would.
A script that uses instep or torch.distributed itself runs as it is on every rank, and so does any
script with --plain. It reads its rank from the usual variables (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, ...).

If a rank fails, the other ranks are stopped and its traceback is printed once, at the end. The
exit code is that of the rank that failed first.

To run on several hosts, name them with `--hosts a:2,b:2` if ssh logs in there without a password.
Or start the command on each of them with `--nnodes 2 --node-rank K --master HOST:PORT`, or one task
per host with srun or mpirun, which need none of these options.

Arguments after the script's name belong to the script. `-m module` runs a module, as `python -m
module` does.
"""
NUMBER = """\
number of ranks on this host (default: one for each GPU; without one, for each core, up to 8)"""
OUTPUT = """\
where the output of ranks other than 0 goes; rank 0 writes to this terminal. All ranks of an
unedited script print the same, so only rank 0's output is shown.
prefix (the default): to this terminal, each line after its rank, as in "[1] loss 0.5".
rank0: nowhere; only the traceback of a rank that failed is printed.
DIR: to the files rank0.out, rank0.err, rank1.out, ... in this folder, also for rank 0"""

LOAD = """\
which samples of a batch each rank of an unedited script loads.
own: its own rows; random augmentation of a sample does not depend on the number of ranks.
whole: all of them, with the same random numbers as plain Python.
auto (the default): own, but whole where samples draw random numbers and are small"""

RESTARTS = """\
how often the job is started again after a rank has failed or a host was lost (default: 0). The
job goes on from the last checkpoint of instep.Checkpoint or --checkpoint. The same exception twice
without a new checkpoint in between ends the job"""
MIN = """\
with --max-restarts: go on with fewer ranks, down to this number in all, when a host was lost or the
same rank has died twice in the same way without a new checkpoint in between (default: as many ranks
as at first)"""
CHECKPOINT = """\
save the training loop of an unedited script in this folder after each iteration (epoch), and go on
from there if the folder holds one; at any number of ranks"""

BITWISE = """\
cut every batch into V shards, whatever the number of ranks, and add up along one tree: the numbers
have the same bits at any N that divides V (a power of two)"""

HOSTS = """\
the hosts and the number of ranks on each (without a number: -n), started by ssh from here. They
share the folder, the interpreter and the files"""

_CROWDED = 2
"""Ranks per core; with more of them the start takes long, and a line says why."""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "run",
        help="run a script on several processes",
        description=RUN,
        usage="instep run [-n N] [options] (script.py | -m module) [args ...]",
    )
    parser.add_argument(*RANKS, dest="n", type=_number_of_ranks, metavar="N", help=NUMBER)
    parser.add_argument(
        "--plain", action="store_true", help="run the script as it is, and divide nothing"
    )
    parser.add_argument("--load", choices=("auto", "own", "whole"), help=LOAD)
    parser.add_argument("--checkpoint", metavar="FOLDER", help=CHECKPOINT)
    parser.add_argument("--bitwise", type=int, metavar="V", help=BITWISE)
    parser.add_argument("--output", default="prefix", metavar="prefix|rank0|DIR", help=OUTPUT)
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="write the collectives and phases of all ranks; see: instep timeline FILE",
    )
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K", help=RESTARTS)
    parser.add_argument("--min", type=int, metavar="M", dest="min_ranks", help=MIN)
    parser.add_argument("--hosts", "--host", "-H", metavar="HOST:N,...", help=HOSTS)
    parser.add_argument(
        "--nnodes",
        type=int,
        metavar="M",
        help="number of hosts; 1: only this host, also inside srun or mpirun",
    )
    parser.add_argument("--node-rank", type=int, metavar="K", help="number of this host, from 0")
    parser.add_argument(
        "--master", metavar="HOST:PORT", help="an address of host 0 and a free port there"
    )
    parser.add_argument(
        "--dist-file",
        metavar="FILE",
        help="instead of --master: a new file on a file system that all hosts share",
    )


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Run the job and return the exit code. Raises LaunchError."""
    command = tuple(program)
    slots = None if asked.hosts is None else _slots(asked)
    ranks = _ranks_here(asked, command) if slots is None else sum(slots.values())
    _check_restarts(asked, ranks)
    variables = _variables(asked, ranks)
    if slots is not None:
        return _run_on_hosts(asked, slots, command, variables)
    job = Job(
        ranks,
        command,
        asked.output,
        asked.plain,
        variables=lambda rank: variables,
        hosts=_hosts(asked, ranks),
    )
    _mention_few_cores(ranks)
    started = partial(_mention_findings, job)
    policy = RestartPolicy(asked.max_restarts, asked.min_ranks)
    return run_attempts(job, policy, started=started).print_report()


def _ranks_here(asked: argparse.Namespace, command: tuple[str, ...]) -> int:
    """The number of ranks on this host: that of -n, or one that is printed."""
    if asked.n is not None:
        check_size(asked.n)
        return int(asked.n)
    check_command(command)  # what is wrong with it comes before the line about their number
    return choose_number_of_ranks(command, is_one_host=_is_one_host(asked), shards=asked.bitwise)


def _variables(asked: argparse.Namespace, ranks: int) -> dict[str, str]:
    """The settings of the job's ranks by the options. Raises CommandLineError, BitwiseError."""
    variables = {settings.LOAD.name: asked.load} if asked.load else {}
    if asked.checkpoint:
        variables[settings.CHECKPOINT.name] = os.path.abspath(asked.checkpoint)
    if asked.bitwise is not None and asked.plain:
        raise CommandLineError("--bitwise divides the script's work, --plain does not: drop one.")
    if asked.bitwise is not None or (settings.is_bitwise() and not asked.plain):
        variables |= bitwise.variables(asked.bitwise, ranks)
    if asked.timeline:
        variables[settings.TIMELINE.name] = os.path.abspath(asked.timeline)
    return variables


def _slots(asked: argparse.Namespace) -> dict[str, int]:
    """The number of ranks on each host of --hosts."""
    by_hand = (asked.nnodes, asked.node_rank, asked.master, asked.dist_file)
    if any(value is not None for value in by_hand):
        raise CommandLineError(
            "--hosts starts all hosts: leave --nnodes, --node-rank, --master, --dist-file out."
        )
    return parse_hosts(asked.hosts, asked.n or 1)


def _run_on_hosts(
    asked: argparse.Namespace,
    slots: Mapping[str, int],
    command: tuple[str, ...],
    variables: Mapping[str, str],
) -> int:
    """Run the job on the hosts of --hosts."""
    check_size(sum(slots.values()))
    check_command(command)
    return run_on_hosts(
        RemoteOptions(
            slots,
            command,
            asked.output,
            asked.plain,
            variables=lambda rank: variables,
            max_restarts=asked.max_restarts,
            min_ranks=asked.min_ranks,
        )
    )


def _is_one_host(asked: argparse.Namespace) -> bool:
    """Whether neither the options nor the launcher of this command speak of other hosts."""
    if asked.nnodes is not None or asked.node_rank is not None:
        return bool(asked.nnodes == 1)
    return launchers.detect_tasks(os.environ).size == 1


def _check_restarts(asked: argparse.Namespace, ranks: int) -> None:
    """`ranks`: of this host, or of all hosts of --hosts."""
    if asked.max_restarts < 0:
        raise CommandLineError(
            f"--max-restarts takes a whole number from 0 up, not {asked.max_restarts}."
        )
    if asked.min_ranks is None:
        return
    if not asked.max_restarts:
        raise CommandLineError("--min belongs to --max-restarts, which is not there.")
    if asked.min_ranks < 1 or (asked.nnodes in (None, 1) and asked.min_ranks > ranks):
        raise CommandLineError(
            f"--min takes a number of ranks, from 1 to that of -n, not {asked.min_ranks}."
        )


def _hosts(asked: argparse.Namespace, ranks: int) -> NodeConfig:
    """The hosts by the options, or by the launcher that started this command; `ranks`: of this
    one."""
    if asked.nnodes == 1:
        return ONE_NODE
    if asked.nnodes is None and asked.node_rank is None:
        environ = dict(os.environ)
        if asked.dist_file:
            environ[settings.DIST_FILE.name] = asked.dist_file
        return detect_nodes(environ, ranks)
    node, nodes = asked.node_rank, asked.nnodes
    if node is None or nodes is None:
        raise wrong_hosts(f"{'--nnodes' if nodes is None else '--node-rank'} is missing")
    if not 0 <= node < nodes:
        raise wrong_hosts(f"--node-rank {node} of --nnodes {nodes}")
    if asked.master:
        return NodeConfig(node, nodes, parse_address(asked.master))
    if asked.dist_file:
        return NodeConfig(node, nodes, endpoints.SharedFile(os.path.abspath(asked.dist_file)))
    raise wrong_hosts("the hosts need --master or --dist-file to meet")


def _mention_few_cores(ranks: int) -> None:
    """Print one line if the start will take long, because every rank imports torch."""
    count = count_cores()
    if ranks > _CROWDED * count:
        print_line(
            f"starts {ranks} ranks on {count} core{'s' * (count != 1)}; they share the "
            "cores, so it takes a while until all of them are running."
        )


def _mention_findings(job: Job) -> None:
    """Print one line if the script has a mistake of severity error; called while the ranks start.

    Scripts that behave as one process are not checked: those that run unedited, or with --bitwise.
    """
    if settings.BITWISE.name in job.variables(0):
        return
    if not job.plain and static_opt_out.find_opt_out(job.command) is None:
        return
    from instep.check.checker import severe_findings  # takes time that the start must not wait for

    script = job.command[0]
    findings = severe_findings(script) if job.hosts.node == 0 else []
    if findings:
        named = dict.fromkeys(f"{finding.code} ({finding.name})" for finding in findings)
        codes = ", ".join(named)
        print_line(f"{codes} in this script; see: instep check {script}")


def _number_of_ranks(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise wrong_size(value) from None
