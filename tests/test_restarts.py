"""`instep run --max-restarts`: a job whose rank has failed goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

import kills
from instep.launch.job_run import JobResult
from instep.launch.multi_node.hosts import NodeConfig
from instep.launch.restarts.policy import Attempt, RestartPolicy, place_in
from instep.process.failures.record import Failure
from instep.training.checkpoint.resume_point import ResumePoint
from launching import Launch, free_port

pytestmark = pytest.mark.slow

TWO_HOSTS = Attempt((2, 2), (0, 1))
SAVED = ResumePoint(20, "run/step-00000020")


def failed(code: int = -9, rank: int = 1, *, text: str = "", step: int | None = None) -> JobResult:
    point = None if step is None else ResumePoint(step, f"run/step-{step:08d}")
    return JobResult(1, Failure(rank, 0.0, code, text=text), sizes=(2, 2), resume_point=point)


def raised(value: str, step: int | None = None) -> JobResult:
    text = f'Traceback\n  File "train.py", line 3, in <module>\nValueError: {value}\n'
    return failed(1, text=text, step=step)


def lost(node: int) -> JobResult:
    failure = Failure(2 * node, 0.0, 1, lost_host=f"host{node}")
    return JobResult(1, failure, sizes=(2, 2), lost_nodes=(node,), resume_point=SAVED)


def test_a_job_that_ended_well_or_was_told_to_end_is_not_restarted() -> None:
    policy = RestartPolicy(3)
    assert policy.next_attempt(TWO_HOSTS, JobResult(0)).next is None
    ended = replace(failed(), requested_signal=signal.SIGTERM)
    assert policy.next_attempt(TWO_HOSTS, ended).next is None
    requeued = JobResult(75, Failure(0, 0.0, 75))
    assert policy.next_attempt(TWO_HOSTS, requeued).next is None


def test_a_killed_rank_is_replaced_until_the_restarts_are_used_up() -> None:
    policy = RestartPolicy(2)
    first, second, third = (policy.next_attempt(TWO_HOSTS, failed(step=20)) for _ in range(3))
    assert first.next == second.next == TWO_HOSTS
    assert first.message == "restart 1 of 2: the job goes on from run/step-00000020"
    assert third.next is None
    assert third.message == "it was restarted 2 times (--max-restarts)"


def test_without_a_checkpoint_the_job_begins_anew_and_says_so() -> None:
    message = RestartPolicy(2).next_attempt(TWO_HOSTS, failed()).message
    assert message == "restart 1 of 2: the script starts again (instep has no checkpoint of it)"


def test_the_same_error_twice_ends_the_job_unless_it_came_further() -> None:
    policy = RestartPolicy(9)
    assert policy.next_attempt(TWO_HOSTS, raised("boo", 20)).next == TWO_HOSTS
    assert policy.next_attempt(TWO_HOSTS, raised("boo", 30)).next == TWO_HOSTS
    assert policy.next_attempt(TWO_HOSTS, raised("other", 30)).next == TWO_HOSTS
    decision = policy.next_attempt(TWO_HOSTS, raised("other", 30))
    assert decision.next is None
    assert decision.message == "the same error came twice without a new checkpoint in between"


def test_a_rank_that_dies_twice_is_left_out_if_there_is_a_minimum() -> None:
    policy = RestartPolicy(9, min_ranks=3)
    assert policy.next_attempt(TWO_HOSTS, failed(rank=2)).next == TWO_HOSTS
    decision = policy.next_attempt(TWO_HOSTS, failed(rank=2))
    assert decision.next == Attempt((2, 1), (0, 1))
    assert decision.message.startswith("restart 2 of 9 with 3 of 4 ranks: ")
    assert policy.next_attempt(decision.next, failed(rank=2)).next == decision.next


def test_different_deaths_without_a_checkpoint_do_not_end_the_job() -> None:
    policy = RestartPolicy(9, min_ranks=3)
    deaths = [failed(rank=1), failed(rank=2), failed(-signal.SIGSEGV, rank=1), raised("boo")]
    for number, death in enumerate([*deaths, raised("another")], 1):
        decision = policy.next_attempt(TWO_HOSTS, death)
        assert decision.next == TWO_HOSTS
        assert decision.message.startswith(f"restart {number} of 9: ")
    assert policy.next_attempt(TWO_HOSTS, failed(rank=2)).next == Attempt((2, 1), (0, 1))
    assert policy.next_attempt(TWO_HOSTS, raised("boo")).next is None


def test_exit_codes_without_a_word_of_two_ranks_are_two_failures() -> None:
    policy = RestartPolicy(9)
    assert policy.next_attempt(TWO_HOSTS, failed(3, rank=1)).next == TWO_HOSTS
    assert policy.next_attempt(TWO_HOSTS, failed(3, rank=2)).next == TWO_HOSTS
    assert policy.next_attempt(TWO_HOSTS, failed(3, rank=1)).next is None


def test_a_new_checkpoint_forgets_the_failures_before_it() -> None:
    policy = RestartPolicy(9, min_ranks=1)
    for step in (10, 20, 30):
        assert policy.next_attempt(TWO_HOSTS, failed(step=step)).next == TWO_HOSTS


def test_a_lost_host_is_left_out_if_there_is_a_minimum() -> None:
    policy = RestartPolicy(9, min_ranks=2)
    decision = policy.next_attempt(TWO_HOSTS, lost(1))
    assert decision.next == Attempt((2,), (0,))
    alone = place_in(decision.next, NodeConfig(0, 2))
    assert (alone.node, alone.nodes) == (0, 1)
    decision = RestartPolicy(9).next_attempt(TWO_HOSTS, lost(1))
    assert (decision.next, decision.message) == (None, "2 ranks are left, and --min is 4")
    assert RestartPolicy(9, min_ranks=1).next_attempt(TWO_HOSTS, lost(0)).next is None
    third = RestartPolicy(9, 1).next_attempt(Attempt((1, 1, 1), (0, 1, 2)), lost(1))
    assert third.next == Attempt((1, 1), (0, 2))
    assert place_in(third.next, NodeConfig(2, 3)) == NodeConfig(1, 2)


# ------------------------------------------------------------------------------ real processes


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


RESUMES = """
    from instep.training.checkpoint.resume_point import ResumePoint
    restarts = int(os.environ.get("INSTEP_RESTARTS", 0))
    tell(restarts, rank, size)
    if rank == 0:
        ResumePoint(10 * (restarts + 1), f"saved{restarts + 1}").note()
    meeting.wait_for(1)
"""


def test_a_killed_rank_is_started_again_with_all_others(launch: Launch) -> None:
    script = launch.script(f"""{RESUMES}
    print("runs", restarts, flush=True)
    if rank == 1 and restarts < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if restarts < 2:
        forever()
    """)
    folder = launch.folder / "out"
    command = ["-n", 2, "--max-restarts", 3, "--output", folder, script]
    with launch.start(*command) as process:
        for restarts in range(3):
            assert launch.events(2) == [[restarts, 0, 2], [restarts, 1, 2]]
            launch.call(2)
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert [line for line in err.splitlines() if "restart" in line] == [
        f"instep: restart {k} of 3: the job goes on from saved{k}" for k in (1, 2)
    ]
    assert (folder / "rank1.out").read_text() == "runs 0\nruns 1\nruns 2\n"


def test_an_error_of_the_script_comes_twice_and_ends_the_job(launch: Launch) -> None:
    script = launch.script("raise ValueError('boo')")
    ran = launch.run("-n", 1, "--max-restarts", 3, script)
    assert ran.returncode == 1
    assert ran.stderr.count("ValueError: boo") == 2
    assert "instep: not restarted: the same error came twice without a new" in ran.stderr


def test_sigterm_ends_a_job_whatever_restarts_are_left(launch: Launch) -> None:
    script = launch.script("tell(rank)\nforever()")
    with launch.start("-n", 2, "--max-restarts", 3, script) as process:
        launch.events(2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "instep: ended by SIGTERM; ranks 0, 1 were stopped\n"


def test_a_job_that_saved_and_wants_to_be_queued_again_says_so_by_its_code(launch: Launch) -> None:
    script = launch.script("""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    tell(rank)
    forever()
    """)
    with launch.start("-n", 2, "--max-restarts", 3, script) as process:
        launch.events(2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert (process.returncode, err) == (75, "")


def test_the_other_hosts_go_on_when_one_is_lost(launch: Launch) -> None:
    script = launch.script(f"{RESUMES}\n    if not restarts: forever()")
    master = f"127.0.0.1:{free_port()}"

    def start(node: int) -> AbstractContextManager[subprocess.Popen[str]]:
        where = ["--nnodes", 2, "--node-rank", node, "--master", master]
        return launch.start("-n", 1, "--max-restarts", 1, "--min", 1, *where, script)

    with start(1) as second, start(0) as first:
        assert launch.events(2) == [[0, 0, 2], [0, 1, 2]]
        second.kill()
        assert launch.event() == [1, 0, 1]
        launch.call()
        _, err = first.communicate()
    assert first.returncode == 0, err
    assert "restart 1 of 1 with 1 of 2 ranks: the job goes on from saved1\n" in err


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize(
    ("targets", "count"),
    [(["rank"], 1), (["writer", "supervisor"], 6)],
)
def test_a_training_whose_processes_are_killed_ends_with_the_bits_of_one_that_is_not(
    targets: list[str], count: int
) -> None:
    """The short form of tests/kills.py."""
    outcome = kills.run(count, targets, 1, count, lambda outcome: None)
    assert outcome.wrong == []
    assert sum(outcome.kills.values()) >= count


STEP = "        checkpoint.step()\n"
DIES_ONCE = """\
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and instep.rank == 1 and checkpoint.steps == 17:
            os.kill(os.getpid(), 9)
"""


@pytest.mark.launch
@pytest.mark.nightly
def test_a_rank_that_dies_under_torchrun_is_restarted_from_the_checkpoint(tmp_path: Path) -> None:
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    expected = kills.undisturbed(folders[0])
    script = folder / "train.py"
    script.write_text("import os\n" + kills.SCRIPT.replace(STEP, STEP + DIES_ONCE))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "--max-restarts", "1", script, folder],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "(epoch 0, step 15)" in done.stderr
    assert kills.fingerprint(folder) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-restarts", "-1"], "--max-restarts takes a whole number from 0 up, not -1"),
        (["--min", "1"], "--min belongs to --max-restarts"),
        (["--max-restarts", "1", "--min", "3"], "from 1 to that of -n, not 3"),
    ],
)
def test_options_that_do_not_go_together(launch: Launch, options: list[str], said: str) -> None:
    ran = launch.run("-n", 2, *options, launch.script("pass"))
    assert ran.returncode == 2
    assert said in ran.stderr
