"""The states of scalers, master weights, averages, generators and loaders are resumed exactly."""

import random
import shutil
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep
import instep.precision
from instep.compat.apex import amp
from instep.distributed.identity import torch_devices
from instep.errors import NewerFormatError
from instep.training.checkpoint import random_states
from instep.training.checkpoint.on_disk import storage
from pool import run

pytestmark = pytest.mark.slow

STEPS = 9
STOP = 4


def mixed_training(folder, kind, stop_at):
    """Steps under a loss scale, which one of them overflows before `STOP` and one after it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "GradScaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    elif kind == "Apex":
        scaler = amp
        amp.initialize(model, optimizer, "O2", loss_scale="dynamic", verbosity=0)
    else:
        scaler = instep.precision.prepare(model, optimizer, kind, loss_scale="dynamic")
    model = instep.replicate(model)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    batches = torch.rand(STEPS, 6, 4, generator=torch.Generator().manual_seed(1))
    loader = instep.shard(DataLoader(TensorDataset(batches.view(-1, 4)), 6))
    checkpoint = instep.Checkpoint(
        folder, model=model, optimizer=optimizer, scaler=scaler, ema=ema, loader=loader, every=1
    )
    scales = []
    for _ in checkpoint.epochs(1):
        for (x,) in loader:
            overflows = checkpoint.steps in (1, STOP + 2)
            optimizer.zero_grad()
            loss = model(x).float().pow(2).mean() * (float("inf") if overflows else 1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", instep.errors.InstepWarning)  # the inf
                if kind == "GradScaler":
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    with (
                        amp.scale_loss(loss, optimizer)
                        if kind == "Apex"
                        else scaler.scale(loss) as scaled
                    ):
                        scaled.backward()
                    optimizer.step()
            ema.update_parameters(model)
            scales.append(str(scaler.state_dict()))
            checkpoint.step()
            if checkpoint.steps == stop_at:
                checkpoint.close()
                return scales, None
    states = [model.state_dict(), ema.state_dict()]
    masters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    moments = [v for s in optimizer.state.values() for v in s.values()]
    return scales, [*(v for s in states for v in s.values()), *masters, *moments]


@pytest.mark.parametrize("kind", ["GradScaler", "O1", "O2", "Apex"])
def test_loss_scales_master_weights_and_averages_go_on_bit_for_bit(tmp_path, kind):
    whole = run(2, mixed_training, str(tmp_path / "whole"), kind, None)
    begin = run(2, mixed_training, str(tmp_path / "parts"), kind, STOP)
    rest = run(2, mixed_training, str(tmp_path / "parts"), kind, None)
    for rank in range(2):
        assert begin[rank][0] + rest[rank][0] == whole[rank][0]
        assert len(set(whole[rank][0])) > 2
        assert all(map(torch.equal, rest[rank][1], whole[rank][1]))
    assert len(rest[0][1]) == len(whole[0][1])


def test_a_state_dict_of_master_weights_has_all_their_digits(tmp_path):
    """Otherwise O2 above would be exact with parameters that were rounded in both runs."""
    run(2, mixed_training, str(tmp_path), "O2", STOP)
    saved = storage.read(tmp_path / f"step-{STOP:08d}")["model"]
    assert any(not torch.equal(v, v.half().float()) for v in saved.values())


# ------------------------------------------------------------------------------- generators


class StandInCUDA:
    """The accelerator of a machine with a GPU, whose generator is a number in a tensor."""

    def __init__(self, state, *, initialized=True):
        self.state = torch.tensor([state])
        self.initialized = initialized

    def installed(self):
        return patch.object(torch_devices, "own_generator", self.own_generator)

    def own_generator(self, *, begin=False):
        return self if self.initialized or begin else None

    def get_state(self):
        return self.state.clone()

    def set_state(self, state):
        self.state = state.clone()

    def manual_seed(self, seed):
        self.state = torch.tensor([seed])  # of so many bits that none is met by chance


def generators(folder, has_gpu, number, save):
    """Save the generators' states, or restore them from what was saved."""
    cuda = StandInCUDA(number + instep.rank)
    with cuda.installed() if has_gpu else ExitStack():
        checkpoint = instep.Checkpoint(folder, model=nn.Linear(1, 1))
        if save:
            torch.manual_seed(instep.rank)
            checkpoint.save()
        else:
            checkpoint.resume()
        drawn = torch.rand(2), np.random.rand()
    checkpoint.close()
    return cuda.state.item(), drawn


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_generators_with_and_without_a_gpu(tmp_path, before, after):
    saved = run(2, generators, str(tmp_path), before, 10, True)
    again = run(2, generators, str(tmp_path), after, 20, False)
    for rank in range(2):
        assert torch.equal(again[rank][1][0], saved[rank][1][0])
        assert again[rank][1][1] == saved[rank][1][1]
        assert again[rank][0] == (10 if before and after else 20) + rank


def test_a_new_rank_has_streams_of_its_own_on_the_gpu_too(tmp_path):
    run(2, generators, str(tmp_path), True, 10, True)
    results = run(4, generators, str(tmp_path), True, 10, False)
    assert [state for state, _ in results[:2]] == [10, 11]
    assert len({state for state, _ in results} - {12, 13}) == 4
    assert len({tuple(drawn[0].tolist()) for _, drawn in results}) == 4


def test_a_gpu_that_was_not_used_is_not_begun():
    cuda = StandInCUDA(7, initialized=False)
    with cuda.installed():
        assert random_states._capture()["device"] is None


def own_generators(folder, save, seed_by_rank):
    seed = instep.rank if seed_by_rank else 5
    own = {
        "torch": torch.Generator().manual_seed(seed),
        "python": random.Random(seed),
        "numpy": np.random.default_rng(seed),
        "older": np.random.RandomState(seed),
        "bits": np.random.PCG64(seed),
    }

    def draw():
        return [
            torch.randn(3, generator=own["torch"]).tolist(),
            own["python"].gauss(0, 1),
            own["numpy"].random(),
            own["older"].normal(),
            int(own["bits"].random_raw()),
        ]

    with instep.Checkpoint(folder, generator=own["torch"], others=own) as checkpoint:
        if save:
            draw()
            checkpoint.save()
        else:
            assert checkpoint.resume()
        return draw()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_generator_of_the_script_goes_on_at_any_number_of_ranks(tmp_path, size):
    folder = str(tmp_path)
    expected = run(2, own_generators, folder, True, False)[0]
    assert run(size, own_generators, folder, False, False) == [expected] * size


def test_generators_that_differ_go_on_on_their_ranks(tmp_path):
    folder = str(tmp_path)
    first, second = run(2, own_generators, folder, True, True)
    again = run(3, own_generators, folder, False, True)
    assert again[:2] == [first, second]
    for ours, theirs in zip(again[2], zip(first, second, strict=True), strict=True):
        assert ours not in theirs


# ---------------------------------------------------------------------------------- loaders


class Stateful(DataLoader):
    """Stands in for torchdata's StatefulDataLoader: by its contract, `state_dict` is asked for
    inside of a loop and after it, and `load_state_dict` concerns the next iteration."""

    def __init__(self):
        super().__init__(TensorDataset(torch.arange(10.0)), 3, shuffle=True)
        self.loaded = 0
        self._state = {"_num_yielded": 0, "_rng": None, "_iterator_finished": True}
        self._next = None

    def __iter__(self):
        state, self._next = self._next, None
        if state is None or state["_iterator_finished"]:
            rng, taken = torch.get_rng_state(), 0
        else:
            rng, taken = state["_rng"], state["_num_yielded"]
        order = torch.randperm(10, generator=_generator(rng))
        if state is None or state["_iterator_finished"]:
            torch.randperm(10)  # the epoch's draw from the global generator
        self._state = {"_num_yielded": taken, "_rng": rng, "_iterator_finished": False}
        return self._batches(order.split(3)[taken:])

    def _batches(self, batches):
        for batch in batches:
            self.loaded += 1
            self._state["_num_yielded"] += 1
            yield batch
        self._state["_iterator_finished"] = True

    def state_dict(self):
        return dict(self._state)

    def load_state_dict(self, state):
        self._state = dict(state)
        self._next = dict(state)


def accumulating(folder, kind, stop_at=None):
    """Two batches for each step of the optimizer; 5 batches in an epoch leave one over."""
    torch.manual_seed(3)
    table = nn.Embedding(10, 4, sparse=kind == "sparse")
    model = instep.replicate(nn.Sequential(table, nn.Flatten(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = TensorDataset(torch.arange(36).view(18, 2) % 10, torch.linspace(-1, 1, 18)[:, None])
    loader = instep.shard(DataLoader(data, 4, shuffle=True))
    checkpoint = instep.Checkpoint(
        folder,
        model=model,
        optimizer=optimizer,
        loader=loader,
        every=None if stop_at is None else 1,
    )
    batches = 5 * checkpoint.resume() if stop_at is None else 0
    for _ in checkpoint.epochs(2):
        for x, y in loader:
            with instep.no_sync() if kind == "no_sync" and not batches % 2 else nullcontext():
                nn.functional.mse_loss(model(x), y).backward()
            batches += 1
            if batches % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            checkpoint.step()
            if batches == stop_at:
                checkpoint.close()
                return None
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["dense", "sparse", "no_sync"])
def test_gradients_that_no_optimizer_has_used_yet_go_on(tmp_path, kind):
    whole = run(1, accumulating, str(tmp_path / "whole"), kind)[0]
    run(2, accumulating, str(tmp_path / "parts"), kind, 5)
    for size in (3, 1):
        rest = run(
            size, accumulating, str(shutil.copytree(tmp_path / "parts", tmp_path / str(size))), kind
        )[0]
        for name, value in whole.items():
            torch.testing.assert_close(rest[name], value)


def gradients_in_a_checkpoint(folder, zeroes):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoint = instep.Checkpoint(folder, model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if zeroes:
        optimizer.zero_grad(set_to_none=zeroes == "none")
    checkpoint.save()
    checkpoint.close()
    return storage.read_latest(Path(folder))[1]["training"]["grads"]


@pytest.mark.parametrize("zeroes", ["", "none", "zeros"])
def test_gradients_that_an_optimizer_has_used_are_not_saved(tmp_path, zeroes):
    assert run(1, gradients_in_a_checkpoint, str(tmp_path), zeroes) == [[]]


def _generator(state):
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def stateful_loop(folder, stop_at):
    torch.manual_seed(5)
    loader = Stateful()
    checkpoint = instep.Checkpoint(folder, loader=loader, every=1)
    seen = []
    for _ in checkpoint.epochs(3):
        for batch in loader:
            seen.append(batch.tolist())
            checkpoint.step()
            if checkpoint.steps == stop_at:
                checkpoint.close()
                return seen, loader.loaded
    return seen, loader.loaded


@pytest.mark.parametrize("stop_at", [2, 4, 6])
def test_a_stateful_loader_that_is_not_sharded_loads_nothing_again(tmp_path, stop_at):
    whole, _ = run(1, stateful_loop, str(tmp_path / "whole"), None)[0]
    begin, _ = run(1, stateful_loop, str(tmp_path / "parts"), stop_at)[0]
    rest, loaded = run(1, stateful_loop, str(tmp_path / "parts"), None)[0]
    assert begin + rest == whole
    assert loaded == len(rest) == 12 - stop_at


# -------------------------------------------------------------------------------- bad input


def save_newer(folder):
    checkpoint = instep.Checkpoint(folder, model=nn.Linear(1, 1))
    with patch.object(storage, "FORMAT", storage.FORMAT + 1):
        checkpoint.save()
        checkpoint.close()


def resume_newer(folder):
    checkpoint = instep.Checkpoint(folder, model=nn.Linear(1, 1))
    with pytest.raises(NewerFormatError, match="Install that version") as raised:
        checkpoint.resume()
    checkpoint.close()
    return str(raised.value)


def test_a_newer_format_is_raised_on_every_rank(tmp_path):
    run(2, save_newer, str(tmp_path))
    texts = run(2, resume_newer, str(tmp_path))
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------ older files


def from_files_of_ranks(files, folder):
    """Each rank takes one of the files that ranks of an older job wrote, as torch.save has them."""
    torch.manual_seed(instep.rank)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    saved = torch.load(files[instep.rank % len(files)], weights_only=True, map_location="cpu")
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved["model"], "module.")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model = instep.replicate(model)
    with instep.Checkpoint(folder, model=model, optimizer=optimizer) as checkpoint:
        checkpoint.save()
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("size", [1, 3])
def test_files_that_each_rank_wrote_load_at_another_number(tmp_path, prefix, size):
    old = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(old.parameters(), 0.25, momentum=0.9)
    old(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    files = [str(tmp_path / f"checkpoint-rank{rank}.pt") for rank in range(2)]
    for file in files:
        model = {prefix + name: value for name, value in old.state_dict().items()}
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "epoch": 3}, file)
    for model, state in run(size, from_files_of_ranks, files, str(tmp_path / "new")):
        assert all(torch.equal(model[k], v) for k, v in old.state_dict().items())
        assert state["param_groups"][0]["lr"] == 0.25
        assert torch.equal(state["state"][0]["momentum_buffer"], old.weight.grad)
    read = storage.read(tmp_path / "new" / "step-00000000")
    assert sorted(read["model"]) == ["bias", "weight"]
