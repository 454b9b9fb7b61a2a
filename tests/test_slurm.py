"""`instep slurm`: the batch script, and that Slurm takes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import components
from instep import cli
from instep.launch.slurm import Batch, format_script
from launching import LAUNCHER_VARIABLES
from slurm import Slurm


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return dict(line.partition("=")[::2] for line in lines)


def test_a_script_for_gpus() -> None:
    text = format_script(
        Batch("py", ("train.py", "--name", "a b"), "train", nodes=2, tasks=4, gpus=True, time="1-0",
              extra_options=("partition=gpu",))
    )  # fmt: skip
    assert options(text) == {
        "job-name": "train", "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4",
        "time": "1-0", "signal": "TERM@120", "requeue": "", "open-mode": "append",
        "output": "%x-%j.out", "partition": "gpu",
    }  # fmt: skip
    assert "    py -m instep train.py --name 'a b'\n" in text
    assert "scontrol" not in text


def test_a_job_that_goes_on_after_its_limit() -> None:
    text = format_script(Batch("py", ("train.py",), "train", requeue=True))
    assert "if [ $code -eq 143 ] || [ $code -eq 75 ]; then\n    scontrol requeue" in text
    assert "gpus-per-node" not in options(text)
    assert "signal" not in options(format_script(Batch("py", ("train.py",), "train", signal=0)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0", __file__], "takes a whole number from 1 up, not '0'"),
        (["--gpus-per-node", "2", "--tasks-per-node", "2", __file__], "not allowed with"),
        (["--submit"], "nothing to run"),
        (["no-such.py"], "cannot run no-such.py"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["slurm", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_slurm_nothing_is_submitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["slurm", "--submit", __file__]) == 2
    assert "--submit needs sbatch" in capsys.readouterr().err


TRAIN = """
import os, subprocess, sys
import torch
import instep
turn = os.environ.get("SLURM_RESTART_COUNT", "0")
total = instep.all_reduce(torch.tensor(instep.rank + 1.0)).item()
with open(f"{sys.argv[1]}/turn{turn}rank{instep.rank}", "w") as file:
    file.write(f"{os.environ['SLURM_JOB_ID']} {instep.world_size} {total}")
instep.barrier()
if instep.rank == 0 and turn == "0":
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
if turn == "0":
    instep.recv(1 - instep.rank)  # until it is ended
if instep.rank == 0:
    open(f"{sys.argv[1]}/done", "w").close()
"""


@pytest.mark.launch
@pytest.mark.nightly
@components.needs("Slurm")
def test_a_submitted_job_that_is_queued_again_starts_cleanly_under_its_id(
    cluster: Slurm, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    os.mkfifo(tmp_path / "done")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    told = environ | cluster.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "slurm", "--nodes", "2", "--submit", "train.py", tmp_path],
        cwd=tmp_path, env=told, capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    job = ran.stdout.split()[-1]
    cluster.start_again(job)
    (tmp_path / "done").read_text()  # a pipe: returns when rank 0 has come that far
    for turn in range(2):
        for rank in range(2):
            assert (tmp_path / f"turn{turn}rank{rank}").read_text() == f"{job} 2 3.0"
