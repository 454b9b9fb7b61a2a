"""`instep where` on the command line: a running job of this user, found by its process or name."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from instep.distributed.watchdog.stalls import job_socket
from instep.errors import CommandLineError
from instep.launch.ranks.rank_process import ENTRY_MODULE
from instep.process import print_line, procfs, write_text

WHERE = """\
Print what each rank of a running job does now: the collective in which it waits, or the line of the
script that it runs. The job goes on meanwhile.

Run it on a host of the job, as its user. JOB is the process id of `instep run` or of
any process of the job, or its INSTEP_JOB; it may be left out where only one job runs. Ctrl-\\ in
the terminal of `instep run` prints the same.
"""

_WORDS_BEFORE_PROGRAM = {("-m", ENTRY_MODULE): 5, ("-m", "instep"): 2}
"""How many words of a rank's command line stand before its program, by the first two of them."""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "where",
        help="what the ranks of a running job do",
        description=WHERE,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="which job; see above")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--stacks", action="store_true", help="the stacks of all threads of all ranks, too"
    )
    kind.add_argument(
        "--status", action="store_true", help="steps per second and memory of each rank instead"
    )


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Print the job's reply and return the exit code: 1 if it does not reply.

    Raises CommandLineError unless there is exactly one such job.
    """
    jobs = job_socket.find_jobs()
    if asked.job is not None:
        jobs = [job for job in jobs if job_socket.is_of_job(job, asked.job)]
    if not jobs and asked.job is None:
        raise CommandLineError("no job of yours runs here, or its ranks are still starting.")
    if not jobs:
        named = f"{'process ' if asked.job.isdigit() else ''}{asked.job}"
        raise CommandLineError(
            f"{named} is no job of yours on this host, or its ranks are still starting."
        )
    if len(jobs) > 1:
        lines = "".join(f"\n  instep where {job.pid}  {_describe(job.pid)}" for job in jobs)
        raise CommandLineError(f"{len(jobs)} jobs run here. Name one:{lines}")
    question = "stacks" if asked.stacks else "status" if asked.status else "where"
    reply = job_socket.request(jobs[0], question)
    if reply is None:
        print_line(
            f"the job of process {jobs[0].pid} does not reply: it has ended meanwhile, or its "
            "watchers are off (INSTEP_WATCH=off)"
        )
        return 1
    print(reply)
    return 0


def _describe(pid: int) -> str:
    """The program that a rank runs, and its folder."""
    words = procfs.command_line(pid)[1:]
    for place, start in enumerate(pairwise(words)):
        if start in _WORDS_BEFORE_PROGRAM:
            words = words[place + _WORDS_BEFORE_PROGRAM[start] :]
            break
    return f"# {shlex.join(words)} in {procfs.current_folder(pid)}"


def print_report(pids: Sequence[int], *, status: bool) -> None:
    """Write a report on the job of these processes to stderr."""
    jobs = [
        job
        for job in job_socket.find_jobs()
        if any(job_socket.is_of_job(job, str(pid)) for pid in pids)
    ]
    question = "status" if status else "where"
    reply = job_socket.request(jobs[-1], question) if jobs else None
    text = reply or "the ranks have not met yet"
    head = "instep:\n" if "\n" in text else "instep: "
    write_text(2, f"{head}{text}\n")
