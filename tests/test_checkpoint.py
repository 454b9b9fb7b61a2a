"""A training that was interrupted goes on as if it had not been."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import instep
from instep.errors import (
    CannotSaveError,
    CheckpointError,
    FolderInUseError,
    InstepWarning,
    OtherDataError,
    OtherModelError,
)
from instep.training.checkpoint.folder_lock import FolderLock
from instep.training.checkpoint.on_disk import storage
from instep.training.checkpoint.plain_loaders import track
from instep.training.checkpoint.time_limit import SignalFlag
from instep.training.random_streams import RNGStates
from pool import run

pytestmark = pytest.mark.slow

SAMPLES = 22
BATCH = 6
STEPS = 4
"""Of an epoch; the last batch has 4 samples."""


class Augmented(Dataset):
    """Samples with noise from each of the three generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(()) + np.random.rand()
        return torch.full((3,), float(index)).sin() + 0.1 * noise.float(), index


class Stream(IterableDataset):
    def __iter__(self):
        for index in torch.randperm(SAMPLES).tolist():
            yield torch.full((3,), float(index)).sin(), index


def in_memory():
    return TensorDataset(torch.arange(SAMPLES * 3.0).view(-1, 3).sin(), torch.arange(SAMPLES))


def make_loader(kind):
    if kind == "sharded":
        return instep.shard(DataLoader(Augmented(), BATCH, shuffle=True))
    if kind == "workers":
        loader = DataLoader(
            Augmented(), BATCH, shuffle=True, num_workers=2, persistent_workers=True,
            multiprocessing_context="fork",
        )  # fmt: skip
        return instep.shard(loader)
    if kind == "generator":
        generator = torch.Generator().manual_seed(5)
        return instep.shard(DataLoader(in_memory(), BATCH, shuffle=True, generator=generator))
    if kind == "sliced":
        return instep.shard(DataLoader(Stream(), BATCH))
    if kind == "plain":
        return DataLoader(Augmented(), BATCH, shuffle=True)
    assert kind == "plain with workers"
    return DataLoader(
        Augmented(), BATCH, shuffle=True, num_workers=2, multiprocessing_context="fork"
    )


class Training:
    """A script's objects; every random stream is in use."""

    def __init__(self, folder, kind="sharded", width=8, optimizer=torch.optim.AdamW, **options):
        self.model = instep.replicate(
            nn.Sequential(
                nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
            )
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.02, total_steps=3 * STEPS
        )
        self.loader = make_loader(kind)
        self.mean = instep.Mean()
        self.checkpoint = instep.Checkpoint(
            folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            loader=self.loader, metrics={"loss": self.mean}, **options,
        )  # fmt: skip
        self.seen = []

    def train(self, stop_at=None, epochs=3):
        """Until `stop_at`, as if the process died there with its checkpoints on the disk."""
        for epoch in self.checkpoint.epochs(epochs):
            for x, index in self.loader:
                loss = (self.model(x) - index.view(-1, 1) / SAMPLES).pow(2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.mean.update(loss, len(x))
                noise = (torch.rand(()).item(), float(np.random.rand()))
                block = instep.training.batches.registry.find_block(x)
                own = [] if block is not None and block.is_empty else index.tolist()
                self.seen.append((self.checkpoint.steps, epoch, own, *noise))
                self.checkpoint.step()
                if self.checkpoint.steps == stop_at:
                    self.checkpoint.close()
                    return self.result()
        return self.result()

    def result(self):
        return {
            "seen": self.seen,
            "parameters": {k: v.clone() for k, v in self.model.state_dict().items()},
            "moments": [v for s in self.optimizer.state.values() for v in s.values()],
            "rate": self.scheduler.get_last_lr(),
            "loss": self.mean.compute(),
        }


def train(folder, stop_at=None, **options):
    torch.manual_seed(3)
    np.random.seed(3)
    return Training(folder, **options).train(stop_at)


def exactly(a, b):
    """Whether two results are the same in every bit."""
    return (
        all(torch.equal(a["parameters"][k], b["parameters"][k]) for k in b["parameters"])
        and all(map(torch.equal, a["moments"], b["moments"]))
        and (a["rate"], a["loss"]) == (b["rate"], b["loss"])
    )


def samples(results, first=0):
    """The samples of each step, of all ranks."""
    return [
        (step, epoch, [index for result in results for index in result["seen"][k][2]])
        for k, (step, epoch, *_) in enumerate(results[0]["seen"])
        if step >= first
    ]


KINDS = ("sharded", "workers", "generator", "sliced", "plain")
BY_DAY = (("sliced", 2), ("plain", 2), ("sharded", STEPS + 1))


@pytest.mark.parametrize(
    ("kind", "stop_at"),
    [
        pytest.param(kind, stop_at, marks=() if (kind, stop_at) in BY_DAY else pytest.mark.nightly)
        for kind in KINDS
        for stop_at in (2, STEPS, STEPS + 1)
    ],
)
def test_at_the_same_number_of_ranks_it_is_bit_for_bit(tmp_path, kind, stop_at):
    for size in (1, 2):
        whole = run(size, train, str(tmp_path / f"whole{size}"), kind=kind, every=100)
        folder = str(tmp_path / f"parts{size}")
        first = run(size, train, folder, stop_at, kind=kind, every=1)
        rest = run(size, train, folder, kind=kind, every=1)
        for rank in range(size):
            assert first[rank]["seen"] == whole[rank]["seen"][:stop_at]
            assert rest[rank]["seen"] == whole[rank]["seen"][stop_at:]
            assert exactly(rest[rank], whole[rank])


def test_plain_loaders_with_workers_load_again_what_was_taken(tmp_path):
    whole = run(1, train, str(tmp_path / "whole"), kind="plain with workers")
    run(1, train, str(tmp_path / "parts"), STEPS + 2, kind="plain with workers", every=2)
    rest = run(1, train, str(tmp_path / "parts"), kind="plain with workers")
    assert exactly(rest[0], whole[0])


def second_epoch(state, taken, *, is_sharded, has_generator):
    """The samples after the first `taken` batches of the second epoch, a random number behind them,
    and the state before; with a state that goes on from it."""
    torch.manual_seed(3)
    loader = DataLoader(
        in_memory(), BATCH, shuffle=True, num_workers=1, persistent_workers=True,
        multiprocessing_context="fork", generator=torch.Generator() if has_generator else None,
    )  # fmt: skip
    loader = instep.shard(loader) if is_sharded else loader
    position = loader if is_sharded else track(loader)
    if state is None:
        assert len([*loader]) == STEPS
    else:
        position.load_state_dict(state[0])
        state[1].restore()
    batches = iter(loader) if taken else None
    for _ in range(taken if state is None else 0):
        next(batches)
    saved = position.state_dict(), RNGStates.capture()
    rest = [index.tolist() for _, index in (batches or loader)]
    return rest, torch.rand(()).item(), saved


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("taken", [0, 2])
def test_persistent_workers_that_are_started_again_draw_nothing(is_sharded, has_generator, taken):
    """They had drawn their seed before the first epoch; the second one's order comes later."""
    kind = {"is_sharded": is_sharded, "has_generator": has_generator}
    *whole, state = second_epoch(None, taken, **kind)
    *rest, _ = second_epoch(state, taken, **kind)
    assert rest == whole


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_at_another_number_of_ranks_the_samples_are_the_same(tmp_path, before, after):
    sgd = {"optimizer": torch.optim.SGD}  # Adam makes steps of rounding noise
    whole = run(1, train, str(tmp_path / "whole"), **sgd)
    run(before, train, str(tmp_path / "parts"), STEPS + 2, every=3, **sgd)
    rest = run(after, train, str(tmp_path / "parts"), every=3, **sgd)
    # The checkpoint is that of the step before the end: what came later is done again.
    first = STEPS + 2 - (STEPS + 2) % 3
    assert samples(rest) == samples(whole, first)
    for name, value in whole[0]["parameters"].items():
        assert torch.allclose(rest[0]["parameters"][name], value, rtol=1e-5, atol=1e-6), name
    assert rest[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-4)


def test_a_training_that_has_ended_has_nothing_left(tmp_path):
    ended = run(2, train, str(tmp_path), keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000008", "step-00000012"]
    again = run(2, train, str(tmp_path))
    assert again[1]["seen"] == []
    assert exactly(again[1], ended[1])


def epochs_without_steps(folder):
    counter = nn.Linear(1, 1)
    checkpoint = instep.Checkpoint(folder, model=counter)
    return list(checkpoint.epochs(3)), list(checkpoint.epochs(5)), checkpoint.latest().name


def test_a_script_without_steps_counts_epochs(tmp_path):
    assert run(1, epochs_without_steps, str(tmp_path))[0] == ([0, 1, 2], [3, 4], "step-00000005")


def leave_epochs_early(folder, total):
    loader = instep.shard(DataLoader(in_memory(), BATCH, shuffle=True))
    checkpoint = instep.Checkpoint(folder, loader=loader)
    seen = []
    for _ in checkpoint.epochs(total):
        for count, (_, index) in enumerate(loader):
            seen.append(index.tolist())
            if count == 1:
                break
    return seen


def test_an_epoch_that_the_script_leaves_early_has_ended(tmp_path):
    whole = run(1, leave_epochs_early, str(tmp_path / "whole"), 4)[0]
    begin = run(1, leave_epochs_early, str(tmp_path / "parts"), 2)[0]
    rest = run(1, leave_epochs_early, str(tmp_path / "parts"), 4)[0]
    assert begin + rest == whole


def order_of_a_generator(folder, is_sharded, every, stop_at=None):
    sampler = RandomSampler(in_memory(), generator=torch.Generator().manual_seed(5))
    loader = DataLoader(in_memory(), BATCH, sampler=sampler)
    loader = instep.shard(loader) if is_sharded else loader
    checkpoint = instep.Checkpoint(folder, loader=loader, every=every)
    seen = []
    for _ in checkpoint.epochs(3):
        for _, index in loader:
            seen.append(index.tolist())
            checkpoint.step()
            if checkpoint.steps == stop_at:
                checkpoint.close()
                return seen
    return seen


@pytest.mark.parametrize("every", [1, None], ids=["in mid-epoch", "after an epoch"])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_samplers_own_generator_goes_on(tmp_path, is_sharded, every):
    whole = run(1, order_of_a_generator, str(tmp_path / "whole"), is_sharded, every)[0]
    run(1, order_of_a_generator, str(tmp_path / "parts"), is_sharded, every, STEPS + 2)
    rest = run(1, order_of_a_generator, str(tmp_path / "parts"), is_sharded, every)[0]
    assert rest == whole[STEPS + 2 if every else STEPS :]


# ---------------------------------------------------------------------------- other objects


def lists_and_names(folder):
    torch.manual_seed(instep.rank)
    models = {"gen": nn.Linear(2, 2), "dis": [nn.Linear(2, 1), nn.BatchNorm1d(1)]}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models["dis"]]
    for each in optimizers:
        for parameter in each.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        each.step()
    ema = torch.optim.swa_utils.AveragedModel(models["gen"])
    checkpoint = instep.Checkpoint(
        folder, model=models, optimizer=optimizers, scaler=scaler, ema=ema
    )
    before = instep.broadcast_object(torch.rand(3)), torch.rand(3)
    if not checkpoint.resume():
        checkpoint.save()
        after = torch.rand(3)
        checkpoint.close()
        return models["gen"].weight.detach(), scaler.get_scale(), before and after
    checkpoint.close()
    return models["gen"].weight.detach(), scaler.get_scale(), torch.rand(3)


def test_lists_dicts_and_other_names_and_each_ranks_own_generator(tmp_path):
    saved = run(2, lists_and_names, str(tmp_path))
    again = run(2, lists_and_names, str(tmp_path))
    assert not torch.equal(saved[0][2], saved[1][2])
    for rank in (0, 1):
        assert torch.equal(again[rank][0], saved[0][0])
        assert torch.equal(again[rank][2], saved[rank][2])
    three = run(3, lists_and_names, str(tmp_path))
    assert len({tuple(result[2].tolist()) for result in three}) == 3


def names_of(folder):
    model = nn.Linear(2, 1)
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    with instep.Checkpoint(folder, model=wrapped) as checkpoint:
        checkpoint.save()
    return sorted(storage.read(checkpoint.latest())["model"])


def test_names_have_no_prefix(tmp_path):
    assert run(1, names_of, str(tmp_path))[0] == ["bias", "weight"]


# --------------------------------------------------------------------------------- bad input


def resume_raises(folder, error, match, make):
    with pytest.raises(error, match=match):
        make(folder)
    return True


def other_width(folder):
    Training(folder, width=9).checkpoint.resume()


def other_model(folder):
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    instep.Checkpoint(folder, model=model, **dict.fromkeys(("optimizer",))).resume()


def no_scheduler(folder):
    training = Training(folder)
    training.checkpoint.close()
    instep.Checkpoint(folder, model=training.model, ema=nn.Linear(1, 1)).resume()


def train_wrong(folder, change):
    global SAMPLES, BATCH
    before = SAMPLES, BATCH
    SAMPLES, BATCH = SAMPLES + change[0], BATCH + change[1]
    try:
        Training(folder).train()
    finally:
        SAMPLES, BATCH = before


def fewer_samples(folder):
    train_wrong(folder, (-2, 0))


def larger_batches(folder):
    train_wrong(folder, (0, 1))


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (
            OtherModelError,
            r"differ: 0\.weight \(8, 3\), here \(9, 3\), 0\.bias",
            other_width,
        ),
        (OtherModelError, "it has a optimizer, which is not given", no_scheduler),
        (OtherModelError, "it has no ema", no_scheduler),
        (OtherDataError, "after 6 samples .* over 22 samples; the data set has 20", fewer_samples),
        (OtherDataError, "after 6 samples of an epoch, and no batch", larger_batches),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, error, match, make):
    run(2, train, str(tmp_path), STEPS + 1, every=1)
    assert run(2, resume_raises, str(tmp_path), error, match, make) == [True, True]


def other_names(folder, save):
    parts = [("a", nn.Linear(1, 1)), ("b" if save else "c", nn.Linear(1, 1))]
    model = nn.Sequential()
    for name, part in parts:
        model.add_module(name, part)
    checkpoint = instep.Checkpoint(folder, model=model)
    if save:
        checkpoint.save()
        checkpoint.close()
        return None
    with pytest.raises(OtherModelError) as raised:
        checkpoint.resume()
    checkpoint.close()
    return str(raised.value)


def test_keys_of_another_model_are_named(tmp_path):
    run(2, other_names, str(tmp_path), True)
    text = run(2, other_names, str(tmp_path), False)[1]
    assert "it lacks: c.weight, c.bias; only it has: b.weight, b.bias" in text


def resume_past_damage(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(folder)
        training.checkpoint.resume()
        training.checkpoint.close()
    told = [w for w in caught if issubclass(w.category, InstepWarning)]
    assert {w.filename for w in told} <= {__file__}, "not a file of instep"
    return training.checkpoint.steps, [str(w.message) for w in told]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    run(2, train, str(tmp_path), 3, every=1)
    path = tmp_path / "step-00000003" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = run(2, resume_past_damage, str(tmp_path))
    assert [steps for steps, _ in found] == [2, 2]
    assert "step-00000003/model.safetensors is damaged" in found[0][1][0]


def resume_and_count(folder, reads):
    """How often this rank opens a file of tensors; `reads`: whether rank 1's disk can be read."""
    opened = []

    def count(file, *args, original=open, **kwargs):
        if str(file).endswith(".safetensors"):
            opened.append(Path(file).name)
            if instep.rank == 1 and not reads:
                raise OSError("a disk that fails")
        return original(file, *args, **kwargs)

    training = Training(folder)
    with patch("builtins.open", count):
        training.checkpoint.resume()
    training.checkpoint.close()
    return Counter(opened), training.model.state_dict()


def test_each_rank_reads_each_file_once(tmp_path):
    run(2, train, str(tmp_path), 3, every=3)
    files = Counter(file.name for file in tmp_path.glob("step-*/*.safetensors"))
    assert len(files) >= 2
    for opened, _ in run(2, resume_and_count, str(tmp_path), True):
        assert opened == files


def test_a_rank_that_cannot_read_gets_the_state_of_rank_0(tmp_path):
    run(2, train, str(tmp_path), 3, every=3)
    [(_, first), (opened, second)] = run(2, resume_and_count, str(tmp_path), False)
    assert sum(opened.values()) == 1
    saved = storage.read(tmp_path / "step-00000003")["model"]
    for name, value in saved.items():
        assert torch.equal(first[name], value)
        assert torch.equal(second[name], value)


def hold(folder):
    checkpoint = instep.Checkpoint(folder, model=nn.Linear(1, 1))
    with pytest.raises(FolderInUseError, match=rf"process {os.getpid()} on ") as raised:
        FolderLock(Path(folder), timeout=0)
    child = os.fork()
    if not child:  # a worker of a loader that outlives its rank
        signal.pause()
    checkpoint.close()
    instep.Checkpoint(folder, model=nn.Linear(1, 1)).close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return str(raised.value)


def test_two_jobs_cannot_write_to_one_folder(tmp_path):
    assert "another job writes its checkpoints" in run(1, hold, str(tmp_path))[0]


def let_go(folder):
    may_write, write = threading.Event(), storage.write_encoded

    def write_later(*args):
        assert may_write.wait(20)
        return write(*args)

    with patch.object(storage, "write_encoded", write_later):
        instep.Checkpoint(folder, model=nn.Linear(1, 1)).save()
        gc.collect()
        with pytest.raises(FolderInUseError):
            FolderLock(Path(folder), timeout=0)
        may_write.set()
        second = instep.Checkpoint(folder, model=nn.Linear(1, 1))  # waits for the first one's write
    assert second.resume()
    second.close()


def test_a_checkpoint_that_the_script_has_let_go_of_is_written_first(tmp_path):
    run(1, let_go, str(tmp_path))


def test_the_lock_of_a_dead_job_is_taken_over(tmp_path):
    code = (
        "import os, signal, sys, pathlib\n"
        "from instep.training.checkpoint.folder_lock import FolderLock\n"
        "lock = FolderLock(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".lock").read_text().startswith("process ")
    run(1, train, str(tmp_path), 1)


def fail_to_open(folder):
    if not os.getuid():
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*ermission"):
            instep.Checkpoint(folder, model=nn.Linear(1, 1))
    finally:
        os.seteuid(os.getuid())
    return True


def test_a_folder_without_rights(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    assert run(1, fail_to_open, str(folder)) == [True]


def fail_to_write(folder):
    training = Training(folder, every=2)
    training.checkpoint.resume()
    blocked = Path(folder) / f".step-00000004.{os.getpid()}.draft"
    messages = []
    for step in range(1, 7):
        if step == 4 and instep.rank == 0:
            blocked.write_text("a file where the draft shall be")
        try:
            training.checkpoint.step()
            training.checkpoint._writer.wait()
        except CheckpointError as error:
            messages.append((step, str(error)))
            blocked.unlink(missing_ok=True)
    training.checkpoint.close()
    return messages


def test_a_failed_write_is_raised_at_the_next_call_on_every_rank(tmp_path):
    for messages in run(2, fail_to_write, str(tmp_path)):
        assert [step for step, _ in messages] == [5]
        assert "step-00000004 could not be written: " in messages[0][1]
    steps = [storage.step_of(path) for path in storage.list_checkpoints(tmp_path)]
    assert steps == [6, 2]


class Unsavable:
    def state_dict(self):
        return {"a": [lambda: 0]}

    def load_state_dict(self, state):
        pass


def save_what_cannot_be(folder):
    checkpoint = instep.Checkpoint(folder, odd=Unsavable())
    with pytest.raises(CannotSaveError, match=r"odd\.a\[0\] is a builtins\.function"):
        checkpoint.save()
    with pytest.raises(CannotSaveError, match=r"model\['x'\] is a int"):
        instep.Checkpoint(folder, model={"x": 3})
    checkpoint.close()
    return True


def test_a_value_that_cannot_be_saved_is_named_on_every_rank(tmp_path):
    assert run(2, save_what_cannot_be, str(tmp_path)) == [True, True]


def begin_without_resuming(folder):
    training = Training(folder, every=1)
    with pytest.raises(CheckpointError, match="of a training that was not resumed"):
        training.checkpoint.step()
    training.checkpoint.close()
    return True


def test_a_training_that_was_not_resumed_changes_nothing(tmp_path):
    run(2, train, str(tmp_path), 3, every=3)
    assert run(2, begin_without_resuming, str(tmp_path)) == [True, True]
    assert [path.name for path in storage.list_checkpoints(tmp_path)] == ["step-00000003"]


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="every is None or a number from 1 on, not 0"):
        instep.Checkpoint(tmp_path, every=0)
    with pytest.raises(ValueError, match="shard_bytes is a number from 1 on, not 0"):
        instep.Checkpoint(tmp_path, shard_bytes=0)
    with pytest.raises(ValueError, match="training cannot be the name"):
        instep.Checkpoint(tmp_path, training=nn.Linear(1, 1))


# ---------------------------------------------------------------------------------- signals


def train_until_signal(folder, number):
    torch.manual_seed(3)
    np.random.seed(3)
    training = Training(folder)
    original = training.mean.update

    def update(*args):
        original(*args)
        if training.checkpoint.steps == STEPS and instep.rank == instep.world_size - 1:
            os.kill(os.getpid(), number)

    training.mean.update = update
    try:
        training.train()
    except SystemExit as end:
        return end.code, signal.getsignal(number) is signal.SIG_DFL
    return None


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path, number):
    whole = run(2, train, str(tmp_path / "whole"))
    assert run(2, train_until_signal, str(tmp_path / "parts"), number) == [(75, True)] * 2
    assert storage.step_of(storage.latest(tmp_path / "parts")) == STEPS + 1
    rest = run(2, train, str(tmp_path / "parts"))
    assert exactly(rest[1], whole[1])


def train_with_signals_to_workers(folder, number):
    """Each worker gets the signal at each step, as Slurm sends it to every process of a job."""
    torch.manual_seed(3)
    np.random.seed(3)
    training = Training(folder, "workers")
    original = training.mean.update

    def update(*args):
        original(*args)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, number)

    training.mean.update = update
    return training.train()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_workers_of_loaders_outlive_a_signal_that_asks_to_save(tmp_path, number):
    (whole,) = run(1, train, str(tmp_path / "whole"), kind="workers")
    (told,) = run(1, train_with_signals_to_workers, str(tmp_path / "told"), number)
    assert exactly(told, whole)


@pytest.mark.parametrize("where", ["a forked child", "nothing would be saved"])
def test_a_signal_that_cannot_save_ends_the_process(where):
    flag = SignalFlag() if where == "a forked child" else None
    child = os.fork()
    if not child:
        flag = flag or SignalFlag(lambda frame: False)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if flag:
        flag.remove()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


# ------------------------------------------------------------------------------ older files


def from_old_file(path, folder):
    """As docs/long-runs.md has it."""
    torch.manual_seed(instep.rank)
    model = instep.replicate(nn.Linear(2, 1))
    state = torch.load(path, weights_only=True, map_location="cpu")
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)
    checkpoint = instep.Checkpoint(folder, model=model)
    checkpoint.save()
    checkpoint.close()
    return storage.read(checkpoint.folder / "step-00000000")["model"]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_files_of_torch_save_load_with_and_without_a_prefix(tmp_path, prefix):
    saved = nn.Linear(2, 1).state_dict()
    torch.save({prefix + name: value for name, value in saved.items()}, tmp_path / "old.pt")
    for state in run(2, from_old_file, str(tmp_path / "old.pt"), str(tmp_path / "new")):
        assert torch.equal(state["weight"], saved["weight"])


class Resumable(DataLoader):
    """A loader with a state of its own, as torchdata's StatefulDataLoader has."""

    def __init__(self):
        super().__init__(in_memory())
        self.taken = self.loaded = 0

    def __iter__(self):
        return self.batches(torch.randperm(SAMPLES).split(BATCH))

    def batches(self, order):
        for batch in order[self.taken :]:
            self.taken += 1
            self.loaded += 1
            yield (batch + torch.rand(batch.shape),)
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def loop(folder, stop_at):
    torch.manual_seed(3)
    loader = Resumable()
    sharded = instep.shard(loader)
    checkpoint = instep.Checkpoint(folder, loader=sharded, every=1)
    seen = []
    for _ in checkpoint.epochs(2):
        for x, *_ in sharded:
            seen.append(x.tolist())
            checkpoint.step()
            if checkpoint.steps == stop_at:
                checkpoint.close()
                return seen, None
    return seen, loader.loaded


def test_a_loader_with_a_state_of_its_own_loads_nothing_again(tmp_path):
    whole = run(2, loop, str(tmp_path / "whole"), None)
    begin = run(2, loop, str(tmp_path / "parts"), 2)
    rest = run(2, loop, str(tmp_path / "parts"), None)
    for rank in (0, 1):
        assert begin[rank][0] + rest[rank][0] == whole[rank][0]
        assert rest[rank][1] == 2 * STEPS - 2
