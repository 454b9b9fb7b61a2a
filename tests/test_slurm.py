"""`instep slurm`: the batch script, and that Slurm takes it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
        Batch(("py",), ("train.py", "--name", "a b"), "train", nodes=2, tasks=4, gpus=True,
              time="1-0", extra_options=("partition=gpu",))
    )  # fmt: skip
    assert options(text) == {
        "job-name": "train", "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4",
        "time": "1-0", "signal": "TERM@120", "requeue": "", "open-mode": "append",
        "output": "%x-%j.out", "partition": "gpu",
    }  # fmt: skip
    assert "    py -m instep train.py --name 'a b'\n" in text
    assert "scontrol" not in text


def test_a_script_for_other_accelerators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    assert cli.main(["slurm", "--gres", "npu:ascend910:8", str(tmp_path / "train.py")]) == 0
    found = options(capsys.readouterr().out)
    assert (found["gres"], found["ntasks-per-node"]) == ("npu:ascend910:8", "8")
    assert "gpus-per-node" not in found


def test_a_job_that_goes_on_after_its_limit() -> None:
    text = format_script(Batch(("py",), ("train.py",), "train", requeue=True))
    assert "if [ $code -eq 143 ] || [ $code -eq 75 ]; then\n    scontrol requeue" in text
    assert "gpus-per-node" not in options(text)
    assert "signal" not in options(format_script(Batch(("py",), ("train.py",), "train", signal=0)))


OPTIONS_OF_PYTHON = ["-O", "-W", "error::UserWarning", "-X", "faulthandler"]


def test_the_ranks_have_the_options_that_python_had_here() -> None:
    command = [sys.executable, *OPTIONS_OF_PYTHON, "-m", "instep", "slurm"]
    words = ["--tasks-per-node", "2", __file__]
    written = subprocess.check_output([*command, *words], text=True, timeout=20)
    line = next(line for line in written.splitlines() if " -m instep " in line)
    shown = "import sys; print(sys.flags.optimize, sys.warnoptions[-1], *sys._xoptions)"
    rank = [*shlex.split(line.partition("-m instep")[0]), "-c", shown]
    told = subprocess.check_output(rank, text=True, timeout=20)
    assert told.split() == ["1", "error::UserWarning", "faulthandler"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0", __file__], "takes a whole number from 1 up, not '0'"),
        (["--gres", "npu", __file__], "takes a type and a number, as in npu:8, not 'npu'"),
        (["--gres", "npu:x", __file__], "takes a whole number from 1 up, not 'x'"),
        (["--gpus-per-node", "2", "--tasks-per-node", "2", __file__], "not allowed with"),
        (["--submit"], "nothing to run"),
        (["no-such.py"], "cannot run no-such.py"),
        (["--nodes", "2", __file__, "x"], f"instep slurm --gpus-per-node 4 {__file__} x"),
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
    assert cli.main(["slurm", "--tasks-per-node", "2", "--submit", __file__]) == 2
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
        [sys.executable, "-m", "instep", "slurm", "--nodes", "2",
         "--tasks-per-node", "1", "--submit", "train.py", tmp_path],
        cwd=tmp_path, env=told, capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    job = ran.stdout.split()[-1]
    cluster.start_again(job)
    (tmp_path / "done").read_text()  # a pipe: returns when rank 0 has come that far
    for turn in range(2):
        for rank in range(2):
            assert (tmp_path / f"turn{turn}rank{rank}").read_text() == f"{job} 2 3.0"


RESUMES = """
import os, signal, subprocess, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import instep

folder, turn = sys.argv[1], os.environ.get("SLURM_RESTART_COUNT", "0")
torch.manual_seed(0)
rows = torch.arange(40.0)
data = TensorDataset(torch.stack([rows.sin(), rows.cos()], 1), rows.sqrt()[:, None])
model = instep.replicate(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
loader = instep.shard(DataLoader(data, 8, shuffle=True))
saved = instep.Checkpoint(folder + "/saved", model=model, optimizer=optimizer, loader=loader)
arrived, signalled = os.pipe()
os.set_blocking(signalled, False)
for epoch in saved.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if (turn, saved.steps) in (("0", 6), ("1", 9)):  # in the second epoch
            signal.set_wakeup_fd(signalled)
            instep.barrier()
            if instep.rank == 0:
                job = os.environ["SLURM_JOB_ID"]
                subprocess.run(["scancel", "--signal=TERM", job], check=True)
            os.read(arrived, 1)
        saved.step()
if instep.rank == 0:
    torch.save(model.state_dict(), folder + "/final.pt")
    with open(folder + "/done", "w") as done:
        done.write(f"{instep.world_size}")
"""


@pytest.mark.launch
@pytest.mark.nightly
@components.needs("Slurm")
def test_a_preempted_job_saves_is_queued_again_and_goes_on_with_another_number_of_ranks(
    cluster: Slurm, tmp_path: Path
) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    told = environ | cluster.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    folders = tmp_path / "alone", tmp_path / "queued"
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(RESUMES)
    alone, queued = folders

    def submit(nodes: int) -> str:
        options = ["--nodes", str(nodes), "--tasks-per-node", "1", "--requeue-at-limit", "--submit"]
        ran = subprocess.run(
            [sys.executable, "-m", "instep", "slurm", *options, "train.py", queued],
            cwd=queued, env=told, capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        return ran.stdout.split()[-1]

    os.mkfifo(queued / "done")
    job = submit(2)
    cluster.start_again(job)  # after the sixth step
    cluster.cancel_requeued(job, 2)  # after the ninth
    submit(1)
    assert (queued / "done").read_text() == "1"
    one = [sys.executable, "train.py", alone]
    subprocess.run(one, cwd=alone, env=told | {"SLURM_RESTART_COUNT": "2"}, timeout=60, check=True)
    first, second = (torch.load(f / "final.pt", weights_only=True) for f in folders)
    assert first["weight"].allclose(second["weight"], rtol=1e-5)
    assert first["bias"].allclose(second["bias"], rtol=1e-5)
