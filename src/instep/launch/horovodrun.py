"""`instep horovodrun`: Horovod's command line."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from instep.errors import CommandLineError
from instep.launch import job_run
from instep.launch.elastic import flags as elastic_flags
from instep.launch.elastic.driver import Driver
from instep.launch.elastic.hosts import run_script
from instep.launch.elastic.worlds import worker_variables
from instep.launch.job import Job, check_command
from instep.launch.remote.host_slots import (
    count_slots,
    is_this_host,
    parse_hosts,
    read_hosts,
    take_slots,
)
from instep.launch.remote.remote_job import RemoteOptions, run_on_hosts
from instep.process import print_line, settings

DESCRIPTION = """\
Run a program on N processes of this host, or of several, as Horovod's command of the same name
does: a Python script, or any command (pytest, bash) that starts Python. On other hosts it starts
them by ssh, which must log in without a password.

In the program `import horovod.torch as hvd` imports instep.compat.horovod, unless Horovod is
installed. Each line of output of ranks other than 0 begins with the rank; with --output-filename
DIR every rank writes to files rank0.out, rank0.err, rank1.out, ... in DIR. Flags that tune
Horovod's engine are accepted and listed as not used.

With --min-np, --max-np or --host-discovery-script the job is elastic: when a rank ends, the others
go on from the last commit of hvd.elastic (see docs/coming-from.md).
"""

_VARIABLES = {
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--fusion-threshold-mb": settings.BUCKET_MIB.name,
    "--gloo-timeout-seconds": settings.TIMEOUT.name,
}
"""Flags with a value, and the environment variable in which the ranks read it."""
_UNUSED = (
    *("--disable-cache", "--tcp", "--mpi", "--jsrun", "--mpi-threads-disable", "--autotune"),
    *("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather"),
    *("--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce"),
    *("--no-autotune", "--no-mpi-threads-disable", "--log-without-timestamp"),
    *("--log-with-timestamp", "--prefix-output-with-timestamp"),
)
_UNUSED_VALUES = (
    *(
        "--network-interfaces",
        "--network-interface",
        "--cycle-time-ms",
        "--cache-capacity",
        "--autotune-log-file",
    ),
    *("--autotune-warmup-samples", "--autotune-steps-per-sample", "--mpi-args"),
    *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    *("--binding-args", "--num-nccl-streams", "--thread-affinity", "--log-level"),
    *("--start-timeout",),
)
"""Flags that are accepted and not used: they tune parts that instep does not have, and do not
change the numbers."""
_ABSENT_VALUES = ("--config-file",)
"""Flags that are an error, because the job would not do what they ask for."""
_ANY_COMMAND = ("-m", "instep.launch.worker.any_command")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?$")


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "horovodrun",
        help="run a Horovod script on several processes",
        description=DESCRIPTION,
        usage="instep horovodrun -np N [-H HOST:N,HOST:N] [flags] command [args ...]",
    )
    parser.add_argument("-np", "--num-proc", metavar="N", help="number of ranks")
    parser.add_argument("-H", "--hosts", metavar="HOST:N,...", help="hosts and their slots")
    parser.add_argument("--hostfile", metavar="FILE", help="file with lines such as: node1 slots=4")
    parser.add_argument(
        "--output-filename", default="prefix", metavar="DIR", help="folder for the output"
    )
    parser.add_argument("--timeline-filename", metavar="FILE", help="see: instep timeline FILE")
    parser.add_argument(
        "--timeline-mark-cycles", action="store_true", help="mark cycles in the timeline"
    )
    parser.add_argument("-p", "--ssh-port", metavar="PORT", help="of the hosts' ssh servers")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the key for ssh")
    parser.add_argument("--verbose", action="store_true", help="print the command that is started")
    parser.add_argument(
        "-cb", "--check-build", action="store_true", help="print the available features"
    )
    parser.add_argument("--gloo", action="store_true", help="accepted; Gloo is used anyway")
    parser.add_argument("--no-stall-check", action="store_true", help="do not report late ranks")
    for flag, variable in _VARIABLES.items():
        parser.add_argument(flag, metavar="X", help=f"sets {variable} for the ranks")
    elastic_flags.add_flags(parser)
    for flag in _UNUSED:
        parser.add_argument(flag, dest=flag, action="store_true", help=argparse.SUPPRESS)
    for flag in (*_UNUSED_VALUES, *_ABSENT_VALUES):
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS)


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Run the program and return the exit code. Raises CommandLineError, StartError."""
    given = vars(asked)
    if asked.check_build:
        return _print_build()
    for flag in _ABSENT_VALUES:
        if given[flag]:
            raise CommandLineError(
                f"{flag} is not there: there is no configuration file. Leave it out."
            )
    if unused := [flag for flag in (*_UNUSED, *_UNUSED_VALUES) if given[flag]]:
        print_line(f"not used here: {', '.join(unused)}")
    elastic = elastic_flags.is_elastic(asked)
    size = _number_of_ranks(asked) if elastic else _size(asked)
    options = elastic_flags.parse(asked, size) if elastic else None
    variables = _variables(asked)
    if not program:
        raise CommandLineError("nothing to run: name a command, as in `python train.py`.")
    command = _command(program)
    check_command(command)
    if asked.verbose:
        words = command[2:] if command[:2] == _ANY_COMMAND else command
        print_line(f"{size} ranks: {' '.join(words)}")
    hosts = _hosts(asked) if options is None else None
    if hosts is not None and not all(map(is_this_host, hosts)):
        return _run_on_hosts(asked, take_slots(hosts, size), command, variables)
    job = Job(
        size,
        command,
        asked.output_filename,
        plain=True,
        variables=lambda rank: worker_variables(rank, size) | variables,
    )
    if options is not None:
        hosts_now = partial(_find_hosts, asked, size)
        return Driver(command, asked.output_filename, variables, options, hosts_now).run()
    return job_run.run_job(job, started=lambda: None).print_report()


def _run_on_hosts(
    asked: argparse.Namespace,
    slots: dict[str, int],
    command: tuple[str, ...],
    variables: Mapping[str, str],
) -> int:
    """Run the program on several hosts, each rank with Horovod's variables."""
    places = [
        {"LOCAL_RANK": local, "LOCAL_SIZE": count, "CROSS_RANK": node, "CROSS_SIZE": len(slots)}
        | {"HOSTNAME": host}
        for node, (host, count) in enumerate(slots.items())
        for local in range(count)
    ]

    def variables_of(rank: int) -> dict[str, str]:
        own = {f"HOROVOD_{name}": str(value) for name, value in places[rank].items()}
        return worker_variables(rank, len(places)) | own | dict(variables)

    ssh = ["ssh"]
    if asked.ssh_port:
        ssh += ["-p", asked.ssh_port]
    if asked.ssh_identity_file:
        ssh += ["-i", asked.ssh_identity_file]
    output = asked.output_filename
    options = RemoteOptions(
        slots, command, output, plain=True, variables=variables_of, ssh=tuple(ssh)
    )
    return run_on_hosts(options)


def _find_hosts(asked: argparse.Namespace, size: int, job: str) -> dict[str, int]:
    """The slots of each host of the elastic `job`, as of now. Raises CommandLineError."""
    if script := asked.host_discovery_script:
        slots = elastic_flags.number(asked, "--slots-per-host")
        found = count_slots(run_script(script, slots, job))
    else:
        found = _hosts(asked) or {"localhost": size}
    for host in found:
        if not is_this_host(host):
            raise CommandLineError(
                f"an elastic job has its ranks on this host only, not on {host}. Without --min-np, "
                "--max-np and --host-discovery-script a job may have several hosts."
            )
    return found


def _variables(asked: argparse.Namespace) -> dict[str, str]:
    """The environment variables that the flags stand for."""
    variables = {"HOROVOD_STALL_CHECK_DISABLE": "1"} if asked.no_stall_check else {}
    if asked.timeline_filename:
        variables[settings.TIMELINE.name] = os.path.abspath(asked.timeline_filename)
    if asked.timeline_mark_cycles:
        variables["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    for flag, name in _VARIABLES.items():
        if (value := elastic_flags.number(asked, flag)) is not None:
            variables[name] = str(value)
    return variables


def _size(asked: argparse.Namespace) -> int:
    """The number of ranks. Raises CommandLineError if the hosts have fewer slots."""
    slots = _hosts(asked)
    if slots is None:
        return _number_of_ranks(asked)
    if asked.num_proc is None:
        return sum(slots.values())
    return sum(take_slots(slots, _number_of_ranks(asked)).values())


def _number_of_ranks(asked: argparse.Namespace) -> int:
    """-np. Raises CommandLineError if it is missing or no number."""
    if asked.num_proc is None:
        raise CommandLineError(
            "say how many ranks: instep horovodrun -np 2 python train.py, or -H host0:2,host1:2."
        )
    if not asked.num_proc.isdecimal() or int(asked.num_proc) < 1:
        raise CommandLineError(
            f"-np takes the number of ranks, a whole number from 1 up, not {asked.num_proc!r}."
        )
    return int(asked.num_proc)


def _hosts(asked: argparse.Namespace) -> dict[str, int] | None:
    """The slots of each host; None if the options do not give them."""
    if asked.hosts is not None:
        return parse_hosts(asked.hosts)
    return None if asked.hostfile is None else read_hosts(asked.hostfile)


def _command(program: Sequence[str]) -> tuple[str, ...]:
    """`python [-u] script.py args…` or `python -m module args…` without the interpreter, and any
    other command by way of a module that becomes it. Raises CommandLineError for unknown ones."""
    words = list(program)
    is_python = bool(words) and (
        _PYTHON.match(os.path.basename(words[0])) is not None or words[0] == sys.executable
    )
    if is_python:
        words.pop(0)
        while words[:1] == ["-u"]:  # every line is flushed anyway
            words.pop(0)
        if words and words[0].startswith("-") and words[0] != "-m":
            return (*_ANY_COMMAND, sys.executable, *words)
    elif words and not words[0].endswith(".py"):
        own = os.path.dirname(sys.executable)  # its pytest comes first, as it stands for `python`
        path = os.pathsep.join((own, os.environ.get("PATH", os.defpath)))
        found = shutil.which(words[0], path=path)
        if found is None:
            raise CommandLineError(
                f"there is no command {words[0]!r}. The program is a Python script, as in "
                "`python train.py`, or a command that can be executed."
            )
        return (*_ANY_COMMAND, found, *words[1:])
    return tuple(words)


def _print_build() -> int:
    import torch  # takes seconds, and only --check-build needs it

    cuda = torch.cuda.is_available()
    print("Frameworks: [X] PyTorch  [ ] TensorFlow  [ ] MXNet")
    print("Controllers: [ ] MPI  [X] Gloo")
    print(f"Tensor operations: [{'X' if cuda else ' '}] NCCL  [ ] DDL  [ ] CCL  [ ] MPI  [X] Gloo")
    return 0
