"""examples/imagenet: each way, really launched, has the numbers of plain.py in plain Python."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import components
from test_same_under import MPICH, OPEN_MPI, TORCHRUN, environment

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples" / "imagenet"
DDP = FOLDER.parents[1] / "benchmarks" / "scripts" / "imagenet_ddp.py"
FLAGS = ["-a", "small", "--size", "16", "-b", "16", "-j", "0", "--epochs", "2", "--lr", "0.01"]
PEERS = components.PEERS
HOROVODRUN = [f"{PEERS}/horovodrun", "--disable-cache", "--gloo", "-np", "2", f"{PEERS}/python"]
PYTHON = [sys.executable]
INSTEP = [*PYTHON, "-m", "instep"]
launch = pytest.mark.launch
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """60 images to train (three batches and a tail), 36 to validate (two batches and a tail)."""
    folder = tmp_path_factory.mktemp("imagenet")
    command = [*PYTHON, FOLDER / "make_data.py", folder, "--size", "16", "--train", "5"]
    subprocess.run([*map(str, command), "--val", "3"], check=True, timeout=50)
    return folder


def run(out, data, *command, seconds=100, **more):
    """A way to its end."""
    out.mkdir(exist_ok=True)
    words = [*map(str, command), "--data", str(data), "--out", str(out)]
    return subprocess.run(
        words,
        env=environment(out, **more),
        timeout=seconds,
        cwd=out,
        capture_output=True,
        text=True,
    )


def train(out, data, *command, **more):
    ran = run(out, data, *command, **more)
    assert ran.returncode == 0, ran.stderr


def refused(out, data, *command):
    """What a way that ends with an error says."""
    ran = run(out, data, *command)
    assert ran.returncode != 0
    return ran.stderr


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """plain.py, in plain Python."""
    out = tmp_path_factory.mktemp("alone")
    train(out, data, *PYTHON, FOLDER / "plain.py", *FLAGS)
    return out


def parameters(out, name="last.pt"):
    state = torch.load(out / name, weights_only=True)["model"]
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


def rows(out, name):
    with (out / name).open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(out, alone):
    expected = parameters(alone)
    assert (parameters(out) - expected).norm() < 1e-6 * expected.norm()
    for mine, theirs in zip(rows(out, "epochs.csv"), rows(alone, "epochs.csv"), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if name.endswith("_loss"):
                assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-5)
            else:  # hits and samples, to the sample
                assert mine[name] == theirs[name]


# ------------------------------------------------------------------------------------- each way

WAYS = {
    "plain": ([*INSTEP, "run", "-n", "2", "plain.py"], 1, (), ()),
    "plain, mpirun": ([*MPICH, "-n", "2", *INSTEP, "plain.py"], 1, ("MPICH",), nightly),
    "plain, 3": ([*INSTEP, "run", "-n", "3", "plain.py"], 1, (), nightly),
    "dataparallel alone": ([*PYTHON, "dataparallel.py"], 1, (), nightly),
    "dataparallel": ([*INSTEP, "run", "-n", "2", "dataparallel.py"], 1, (), nightly),
    "distributed": ([*INSTEP, "run", "-n", "3", "distributed.py"], 3, (), nightly),
    "distributed alone": ([*PYTHON, "distributed.py"], 1, (), nightly),
    "torchrun": ([*TORCHRUN, "--nproc-per-node", "2", "distributed.py"], 2, (), nightly),
    "MPICH": ([*MPICH, "-n", "3", *PYTHON, "distributed.py"], 3, ("MPICH",), nightly),
    "spawn": ([*PYTHON, "spawn.py", "--nprocs", "2"], 2, (), nightly),
    "spawn, 3": ([*PYTHON, "spawn.py", "--nprocs", "3"], 3, (), nightly),
    "Jittor": ([*OPEN_MPI, "-n", "2", *PYTHON, "jittor_style.py"], 2, ("Open MPI",), nightly),
    "Jittor, 3": ([*OPEN_MPI, "-n", "3", *PYTHON, "jittor_style.py"], 3, ("Open MPI",), nightly),
    "Horovod's file": (
        [*INSTEP, "horovodrun", "-np", "2", *PYTHON, "horovod_distributed.py", "--same"],
        2, (), nightly,
    ),
    "Horovod itself": ([*HOROVODRUN, "horovod_distributed.py", "--same"], 2, ("Horovod",), nightly),
    "Apex's file": ([*INSTEP, "run", "-n", "2", "apex_distributed.py", "--same"], 2, (), nightly),
    "Apex's file, 3": (
        [*INSTEP, "run", "-n", "3", "apex_distributed.py", "--same"], 3, (), nightly,
    ),
}  # fmt: skip


@launch
@pytest.mark.parametrize(
    ("command", "size"),
    [
        pytest.param(words, size, id=name, marks=[components.needs(*needed)] + [more] * bool(more))
        for name, (words, size, needed, more) in WAYS.items()
    ],
)
def test_the_numbers_of_one_process(tmp_path, data, alone, command, size):
    train(tmp_path, data, *placed(command), *FLAGS)
    assert_same(tmp_path, alone)
    assert {row["rank"] for row in rows(tmp_path, "ranks.csv")} == {*map(str, range(size))}


def placed(command):
    return [FOLDER / word if word.endswith(".py") else word for word in command]


@launch
@nightly
@components.needs("Slurm")
@pytest.mark.parametrize(("ranks", "meet"), [("3", "tcp"), ("2", "file")])
def test_the_numbers_of_one_process_under_slurm(tmp_path, data, alone, cluster, ranks, meet):
    ways = ["--meet", meet, "--folder", tmp_path]
    command = ["srun", "-N2", f"-n{ranks}", *PYTHON, FOLDER / "slurm.py", *FLAGS, *ways]
    train(tmp_path, data, *command, **cluster.environ, GLOO_SOCKET_IFNAME="lo")
    assert_same(tmp_path, alone)


@launch
@nightly
@components.needs("Slurm")
def test_the_batch_script(tmp_path, data, alone, cluster):
    """In an allocation of its own: sbatch looks for a job's end every ten seconds only."""
    told = cluster.environ | {"IMAGENET": str(data), "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{Path(sys.executable).parent}:{environment(tmp_path)['PATH']}"
    ran = subprocess.run(
        ["salloc", "-Q", "-N2", "-n2", "sh", "slurm.sbatch", *FLAGS, "--out", str(tmp_path)],
        env=environment(tmp_path, PATH=path, **told), cwd=FOLDER, timeout=55, check=False,
    )  # fmt: skip
    assert ran.returncode == 0
    assert_same(tmp_path, alone)


@launch
@nightly
@pytest.mark.parametrize(
    "command",
    [
        [*INSTEP, "horovodrun", "-np", "2", *PYTHON, "horovod_distributed.py"],
        [*INSTEP, "run", "-n", "2", "apex_distributed.py"],
        pytest.param([*HOROVODRUN, "horovod_distributed.py"], marks=components.needs("Horovod")),
    ],
    ids=["Horovod", "Apex", "Horovod itself"],
)
def test_the_rules_of_horovod_and_apex_are_those_of_ddp(tmp_path, data, alone, command):
    train(tmp_path, data, *placed(command), *FLAGS)
    theirs = tmp_path / "ddp"
    train(theirs, data, *TORCHRUN, "--nproc-per-node", "2", DDP, *FLAGS)
    assert (parameters(tmp_path) - parameters(theirs)).norm() < 1e-6 * parameters(theirs).norm()
    for mine, ddp in zip(rows(tmp_path, "epochs.csv"), rows(theirs, "epochs.csv"), strict=True):
        # Each validates by running statistics of its rank; DDP's come a step late from rank 0.
        for name in ("train_top1", "train_top5", "train_samples", "val_samples"):
            assert mine[name] == ddp[name]
    assert (parameters(tmp_path) - parameters(alone)).norm() > 1e-3 * parameters(alone).norm()


# ------------------------------------------------------------------------------- the loop's flags


@pytest.fixture
def plain(monkeypatch, tmp_path, data):
    """Run plain.py in this process, with these flags."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import plain

    def train_here(*flags, data=data, out=tmp_path / "out"):
        words = ["plain.py", *FLAGS, "--data", data, "--out", out, *flags]
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        plain.main()
        return out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train_here
    torch.set_num_threads(threads)


def test_a_resumed_training_ends_as_one_that_was_never_stopped(plain, tmp_path):
    whole = plain(out=tmp_path / "whole")
    plain("--epochs", "1")
    out = plain("--resume", tmp_path / "out" / "last.pt")
    assert torch.equal(parameters(out), parameters(whole))
    assert rows(out, "epochs.csv") == rows(whole, "epochs.csv")
    assert [row["epoch"] for row in rows(out, "ranks.csv")] == ["1", "2"]


@launch
@nightly
def test_a_training_goes_on_at_another_number_of_ranks(tmp_path, data, alone):
    train(tmp_path, data, *PYTHON, FOLDER / "plain.py", *FLAGS, "--epochs", "1")
    resume = [*FLAGS, "--resume", tmp_path / "last.pt"]
    train(tmp_path, data, *INSTEP, "run", "-n", "3", FOLDER / "distributed.py", *resume)
    assert_same(tmp_path, alone)


def test_the_best_checkpoint_is_that_of_the_best_epoch(plain, capsys):
    out = plain("--epochs", "4", "--lr", "0.1")
    top1 = [float(row["val_top1"]) for row in rows(out, "epochs.csv")]
    best = torch.load(out / "best.pt", weights_only=True)
    assert best["epochs"] == top1.index(max(top1)) + 1
    assert best["best_top1"] == max(top1)
    assert torch.load(out / "last.pt", weights_only=True)["epochs"] == 4
    capsys.readouterr()
    plain("-e", "--resume", out / "best.pt")
    assert f"top-1 {max(top1):.2%}" in capsys.readouterr().out
    assert len(rows(out, "epochs.csv")) == 4


def test_workers_load_what_the_process_itself_would(plain, tmp_path):
    whole = plain(out=tmp_path / "whole")
    out = plain("-j", "1")
    assert torch.equal(parameters(out), parameters(whole))


def test_the_rate_grows_and_scales_only_when_asked(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from loop import set_rate

    optimizer = torch.optim.SGD([torch.zeros(1)], 1)

    def rate(epoch, passed, **flags):
        told = {"lr": 0.4, "warmup": 0, "linear_scaling": False, "batch_size": 1024} | flags
        set_rate(SimpleNamespace(**told), optimizer, epoch, passed)
        return pytest.approx(optimizer.param_groups[0]["lr"])

    assert rate(0, 0) == 0.4 == rate(29, 0.9)
    assert rate(30, 0) == 0.04
    assert rate(60, 0) == 0.004
    assert rate(0, 0.5, linear_scaling=True) == 1.6
    assert rate(1, 0.5, warmup=3) == 0.2
    assert rate(3, 0, warmup=3) == 0.4


def test_what_is_random_in_an_image_depends_on_seed_epoch_and_index(monkeypatch, data):
    monkeypatch.syspath_prepend(str(FOLDER))
    from images import Images

    def image(seed, epoch, index):
        images = Images(data / "train", 16, "imagenet", seed)
        images.epoch = epoch
        return images[index][0]

    torch.manual_seed(1)
    once = image(0, 1, 2)
    torch.manual_seed(2)
    assert torch.equal(image(0, 1, 2), once)
    for other in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(image(*other), once)


def test_mixed_precision_trains(plain, tmp_path):
    """Another number, but not far: bfloat16 has eight bits."""
    whole, half = plain(out=tmp_path / "whole"), plain("--amp")
    loss = [float(rows(out, "epochs.csv")[-1]["train_loss"]) for out in (whole, half)]
    assert loss[0] != loss[1]
    assert loss[0] == pytest.approx(loss[1], rel=0.05)


@launch
@nightly
@pytest.mark.timeout(600)
def test_it_learns(tmp_path):
    """Over 95 % top-1 on digits and photographs."""
    data = tmp_path / "data"
    subprocess.run([*PYTHON, FOLDER / "make_data.py", data], check=True, timeout=55)
    command = [*INSTEP, "run", "-n", "2", FOLDER / "plain.py", "-a", "small", "--size", "32"]
    more = ["--augment", "light", "-b", "64", "-j", "0", "--epochs", "33", "--lr", "0.05"]
    train(tmp_path, data, *command, *more, "--warmup", "1", seconds=500)
    assert max(float(row["val_top1"]) for row in rows(tmp_path, "epochs.csv")) > 0.95


# ------------------------------------------------------------------------------------- bad input


@pytest.fixture
def copied(tmp_path, data):
    return Path(shutil.copytree(data, tmp_path / "copy"))


def says(plain, message, *flags, error=ValueError, **more):
    with pytest.raises(error, match=message):
        plain(*flags, **more)


def test_a_missing_folder_is_said(plain, copied):
    shutil.rmtree(copied / "val")
    says(plain, "val is no folder; --data holds train/<class>/", data=copied)


def test_a_folder_without_classes_is_said(plain, copied):
    shutil.rmtree(copied / "val")
    (copied / "val").mkdir()
    says(plain, "val holds no folders", data=copied)


def test_an_empty_class_is_named(plain, copied):
    for image in (copied / "train" / "digit3").iterdir():
        image.rename(image.with_suffix(".txt"))
    says(plain, "no image .* in .*train for digit3", data=copied)


def test_a_class_of_one_part_only_is_named(plain, copied):
    shutil.rmtree(copied / "val" / "digit3")
    (copied / "train" / "china").rename(copied / "train" / "japan")
    says(plain, "only train/ has digit3, japan and only val/ has china", data=copied)


def spoil(copied):
    """A truncated image and one that is none, where each image is read."""
    short, text = copied / "val/digit1/digit1_00002.JPEG", copied / "val/digit2/a.png"
    short.write_bytes(short.read_bytes()[:300])
    text.write_text("no image")
    return short, text


@pytest.mark.parametrize("which", [0, 1])
def test_a_broken_image_is_named(plain, copied, which):
    broken = spoil(copied)
    broken[1 - which].unlink()
    says(plain, f"{broken[which].name} is no whole image.*--skip-broken", data=copied)


def test_a_broken_image_is_named_by_a_worker(plain, copied):
    spoil(copied)
    says(plain, "is no whole image", "-j", "1", data=copied)


@pytest.mark.nightly
def test_broken_images_are_left_out_when_asked(plain, copied, tmp_path, capsys):
    for path in spoil(copied):
        path.with_suffix(".kept").write_bytes(path.read_bytes())
    out = plain("--skip-broken", "--epochs", "1", data=copied)
    said = capsys.readouterr().out
    for path in spoil(copied):
        assert f"left out, no whole image: {path}" in said
        path.unlink()
    without = plain("--epochs", "1", data=copied, out=tmp_path / "without")
    assert torch.equal(parameters(out), parameters(without))


def test_a_batch_larger_than_the_data_is_said(plain):
    says(plain, "60 images, less than one batch of 61; make -b smaller", "-b", "61")


def test_a_checkpoint_of_another_architecture_is_said(plain):
    resume = ("-a", "resnet18", "--resume", plain("--epochs", "1") / "last.pt")
    says(plain, "is a checkpoint of small, but -a says resnet18", *resume, error=SystemExit)
    says(plain, "there is no such file", "--resume", "nowhere.pt", error=SystemExit)


@pytest.mark.parametrize("flags", [("-b", "0"), ("-b", "x"), ("-a", "lenet"), ("--epochs", "-1")])
def test_a_flag_of_no_meaning_is_refused(plain, capsys, flags):
    says(plain, "2", *flags, error=SystemExit)
    assert flags[0] in capsys.readouterr().err


@pytest.mark.nightly
@launch
def test_a_batch_smaller_than_the_ranks_is_said(tmp_path, data):
    command = [*INSTEP, "run", "-n", "2", FOLDER / "distributed.py"]
    told = refused(tmp_path, data, *command, *FLAGS, "-b", "1")
    assert "-b 1 is the batch of all ranks together, and there are 2" in told


@launch
@nightly
def test_a_broken_image_is_named_on_many_ranks(tmp_path, data, copied):
    spoil(copied)
    command = [*INSTEP, "run", "-n", "2", FOLDER / "distributed.py"]
    assert "is no whole image" in refused(tmp_path, copied, *command, *FLAGS)


@launch
@nightly
def test_a_batch_that_horovod_cannot_divide_is_said(tmp_path, data):
    command = [*INSTEP, "run", "-n", "3", FOLDER / "horovod_distributed.py"]
    assert "-b 16 cannot be divided by the 3 ranks" in refused(tmp_path, data, *command, *FLAGS)
