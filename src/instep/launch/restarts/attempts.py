"""The attempts of one job: each is a run of all ranks by the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from instep.launch import job_run
from instep.launch.job import Job
from instep.launch.job_run import JobResult
from instep.launch.ranks.rank_process import StartRank
from instep.launch.restarts.policy import Attempt, RestartPolicy, place_in
from instep.launch.restarts.standbys import Standbys
from instep.process import print_line


def run_attempts(job: Job, policy: RestartPolicy, *, started: Callable[[], None]) -> JobResult:
    """Run `job`, and after a failure run it again as long as `policy` says so, if ever.

    Prints a line for each restart; the report about the last failure is the result's. Raises
    LaunchError if the first attempt cannot be started.
    """
    if not policy.max_restarts:
        return job_run.run_job(job, started=started)
    with Standbys() as standbys:
        return _run_attempts(job, policy, started, standbys.start_rank)


def _run_attempts(
    job: Job, policy: RestartPolicy, started: Callable[[], None], start: StartRank
) -> JobResult:
    result = job_run.run_job(job, started=started, start=start)
    attempt = Attempt(result.sizes, tuple(range(len(result.sizes))))
    restarts = 0
    while (decision := policy.next_attempt(attempt, result)).next is not None:
        sys.stderr.write(result.report)
        print_line(decision.message)
        attempt = decision.next
        restarts += 1
        hosts = place_in(attempt, job.hosts)
        following = replace(job, size=attempt.sizes[hosts.node], hosts=hosts, restarts=restarts)
        result = job_run.run_job(following, started=lambda: None, start=start)
    if decision.message:
        print_line(f"not restarted: {decision.message}")
    return result
