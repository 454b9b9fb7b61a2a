"""Standby processes, which become the ranks of a restarted job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from instep.distributed.identity.launchers import FAILURE_FILE
from instep.distributed.identity.world import World, world_variables
from instep.launch.job import Job
from instep.launch.ranks.rank_process import RankProcess, RankSpec, StartRank
from instep.launch.restarts import standbys
from instep.launch.restarts.attempts import run_attempts
from instep.launch.restarts.policy import RestartPolicy
from instep.launch.restarts.standbys import Standbys
from launching import LAUNCHER_VARIABLES, wait_until

pytestmark = pytest.mark.slow

FACTS = """
import gc, json, os, signal, sys, threading
had_torch = "torch" in sys.modules
import torch
shown = open("/proc/self/environ").read().rstrip("\\0").split("\\0")
facts = {
    "argv": sys.argv,
    "environ": dict(os.environ),
    "shown": dict(entry.split("=", 1) for entry in shown),
    "folder": os.getcwd(),
    "leader": os.getsid(0) == os.getpid(),
    "main": [__name__, __file__],
    "path": sys.path,
    "stdin": sys.stdin.read(),
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "threads": [threading.active_count(), torch.get_num_threads()],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "frozen": gc.get_freeze_count() > 100_000,
    "random": torch.initial_seed() if "unedited" in sys.argv else None,
}
print("to stdout")
print("to stderr", file=sys.stderr)
json.dump([had_torch, facts], open(sys.argv[1], "w"))
"""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "DELAY", 0.0)
    for name in [*os.environ]:
        if name.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(name)


def environment(folder: Path, attempt: int, **more: str) -> dict[str, str]:
    """Of a world of one in one attempt."""
    world = world_variables(World())
    this = {FAILURE_FILE: str(folder / f"failure{attempt}"), "INSTEP_JOB": f"job{attempt}"}
    return {**os.environ, **world, **this, "OMP_NUM_THREADS": "1", "INSTEP_SEED": "7", **more}


def run(
    start: StartRank, folder: Path, script: Path, attempt: int, *mode: str, **more: str
) -> RankProcess:
    """Run a rank to its end."""
    out, err = (
        os.open(folder / f"{name}{attempt}", os.O_WRONLY | os.O_CREAT) for name in ("o", "e")
    )
    command = [str(script), str(folder / f"facts{attempt}"), *mode]
    environ = environment(folder, attempt, **more)
    rank = start(RankSpec(0, command, environ, (out, err), None, plain="plain" in mode))
    for fd in (out, err):
        os.close(fd)
    rank.send_go()
    code = rank.record_end(None).code
    rank.reap()
    assert code == 0, (folder / f"failure{attempt}").read_text()
    return rank


@pytest.mark.parametrize("mode", [pytest.param("plain", marks=pytest.mark.nightly), "unedited"])
def test_a_standby_becomes_the_rank_that_a_new_process_would_be(tmp_path: Path, mode: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS)
    with Standbys() as pool:
        run(pool.start_rank, tmp_path, script, 0, mode)
        wait_until(lambda: pool._processes)
        standby = pool._processes["0"]
        rank = run(pool.start_rank, tmp_path, script, 1, mode)
        assert rank.pid == standby._process.pid
    (had_torch, facts), (has_torch, becomes) = (
        json.loads((tmp_path / f"facts{n}").read_text()) for n in (0, 1)
    )
    assert (had_torch, has_torch) == (False, True)
    text = json.dumps(facts)
    for name in ("job", "failure", "facts"):
        text = text.replace(f"{name}0", f"{name}1")
    assert becomes == json.loads(text)
    assert (tmp_path / "o1").read_text() == "to stdout\n"
    assert (tmp_path / "e1").read_text().endswith("to stderr\n")


@pytest.mark.nightly
def test_a_rank_with_other_variables_is_a_new_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS)
    with Standbys() as pool:
        run(pool.start_rank, tmp_path, script, 0, "plain")
        wait_until(lambda: pool._processes)
        process = pool._processes["0"]._process
        rank = run(pool.start_rank, tmp_path, script, 1, "plain", OMP_NUM_THREADS="2")
        assert rank.pid != process.pid
        assert process.returncode is not None
    assert json.loads((tmp_path / "facts1").read_text())[1]["threads"][1] == 2


@pytest.mark.nightly
def test_a_standby_that_was_killed_is_replaced_by_a_new_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS)
    with Standbys() as pool:
        run(pool.start_rank, tmp_path, script, 0, "plain")
        wait_until(lambda: pool._processes)
        process = pool._processes["0"]._process
        process.kill()
        process.wait()
        assert run(pool.start_rank, tmp_path, script, 1, "plain").pid != process.pid


@pytest.mark.nightly
def test_on_a_host_with_accelerators_it_imports_nothing_that_may_ask_for_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS.replace('"torch" in', '"torch" in sys.modules, "torch._dynamo" in'))
    with Standbys() as pool:
        for attempt in range(2):
            run(pool.start_rank, tmp_path, script, attempt, "plain", CUDA_VISIBLE_DEVICES="0")
            if attempt == 0:
                wait_until(lambda: pool._processes)
    assert json.loads((tmp_path / "facts1").read_text())[0] == [True, False]


@pytest.mark.nightly
def test_there_is_none_for_a_script_that_configures_pytorch_before_its_import(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text('import os\nos.environ["OMP_NUM_THREADS"] = "2"\n' + FACTS)
    with Standbys() as pool:
        run(pool.start_rank, tmp_path, script, 0, "plain")
        assert not pool._environments
        assert not pool._processes
        run(pool.start_rank, tmp_path, script, 1, "plain")
    assert json.loads((tmp_path / "facts1").read_text())[1]["threads"][1] == 2


def test_one_that_has_not_imported_pytorch_yet_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS)
    os.mkfifo(tmp_path / "never")
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'never')!r}).read()\n")
    blocked = environment(tmp_path, 0, PYTHONPATH=str(tmp_path))
    with Standbys() as pool:
        threading.Thread(target=pool._start_all, args=({"0": blocked}, pool._stop)).start()
        wait_until(lambda: pool._importing)
        assert pool._importing is not None
        process = pool._importing._process
        rank = run(pool.start_rank, tmp_path, script, 1, "plain")
        assert rank.pid != process.pid
        assert process.returncode is not None


def test_standbys_end_with_their_supervisor(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from instep.launch.restarts import standbys\n"
        "standby = standbys._Standby(dict(__import__('os').environ))\n"
        "print(standby._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    standby = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.communicate()
    assert psutil.wait_procs([standby], timeout=60)[1] == []


@pytest.mark.nightly
def test_a_rank_of_a_restarted_job_was_a_standby(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "import psutil\n"
        "has_torch = 'torch' in sys.modules\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        f"open(f'{tmp_path}/{{rank}}', 'a').write(f'{{has_torch}} ')\n"
        "if 'INSTEP_RESTARTS' not in os.environ:\n"
        "    standbys = lambda: [\n"
        "        each for each in psutil.Process().parent().children()\n"
        "        if 'instep.launch.worker.standby' in each.cmdline()\n"
        "    ]\n"
        "    if rank == 1:\n"
        "        while len(standbys()) < 2: time.sleep(0.1)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    job = Job(2, (str(script),))
    assert run_attempts(job, RestartPolicy(1), started=lambda: None).code == 0
    # The second one is started when the first one is ready.
    assert (tmp_path / "0").read_text() == "False True "
    assert (tmp_path / "1").read_text() in ("False True ", "False False ")
    left = [words_of(each) for each in psutil.Process().children(recursive=True)]
    assert not [words for words in left if str(script) in words]
    assert not [words for words in left if "instep.launch.worker.standby" in words]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended and waits for its parent."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
