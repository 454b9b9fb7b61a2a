"""torchdata's StatefulDataLoader, the real one: resumed in mid-epoch, at any number of ranks."""

import shutil
import warnings
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import instep
from pool import run

pytestmark = pytest.mark.slow

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

SAMPLES = 14
BATCH = 4
STEPS = 4
"""Of an epoch; the last batch has 2 samples."""


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class Noisy(Numbers):
    def __getitem__(self, index):
        return index + torch.rand(()).item() + np.random.rand()


class Stream(IterableDataset):
    """A stream that knows where it is."""

    def __init__(self):
        self.epoch = self.taken = 0

    def __iter__(self):
        while self.taken < SAMPLES:
            self.taken += 1
            yield 100 * self.epoch + self.taken
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.epoch, self.taken = state["epoch"], state["taken"]


class Subclass(DataLoader):
    """A DataLoader of which nothing is known."""


def make(kind):
    dataset = {"noise": Noisy, "stream": Stream}.get(kind, Numbers)()
    workers = {"num_workers": 2, "multiprocessing_context": "fork"} if "workers" in kind else {}
    if kind == "persistent workers":
        workers["persistent_workers"] = True
    if kind == "generator":  # and no state of its own
        generator = torch.Generator().manual_seed(torch.initial_seed())
        return Subclass(dataset, BATCH, shuffle=True, generator=generator)
    order = {"shuffle": kind != "stream" or None}
    if kind == "noise":  # workers' seeds are drawn from it too
        order["generator"] = torch.Generator().manual_seed(torch.initial_seed())
    with warnings.catch_warnings():  # torchdata calls what torch has deprecated
        warnings.simplefilter("ignore", UserWarning)
        return torchdata.StatefulDataLoader(dataset, BATCH, **order, **workers)


def loop(folder, kind, stop_at=None, *, is_sharded=True, seed=5, leaves=False, epochs=3):
    """What each rank saw in each step, with the next number of the global generator."""
    torch.manual_seed(seed + 10 * instep.rank)
    np.random.seed(seed)
    loader = make(kind)
    if is_sharded:
        loader = instep.shard(loader)
    checkpoint = instep.Checkpoint(folder, loader=loader, every=1)
    seen = []
    for _ in checkpoint.epochs(epochs):
        for count, batch in enumerate(loader):
            block = instep.training.batches.registry.find_block(batch) if is_sharded else None
            own = [] if block is not None and block.is_empty else batch.tolist()
            seen.append((own, torch.rand(()).item()))
            checkpoint.step()
            if checkpoint.steps == stop_at:
                checkpoint.close()
                return seen
            if leaves and count == 1:
                break
    return seen


def batches(results):
    """The samples of each step over all ranks."""
    return [[x for own, _ in step for x in own] for step in zip(*results, strict=True)]


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "workers", "stream"),
        pytest.param("noise", marks=pytest.mark.nightly),
        pytest.param("persistent workers", marks=pytest.mark.nightly),
        pytest.param("generator", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "stop", [{"stop_at": 2}, pytest.param({"epochs": 1}, marks=pytest.mark.nightly)]
)
def test_a_sharded_one_goes_on_at_any_number_of_ranks(tmp_path, kind, stop):
    whole = run(2, loop, str(tmp_path / "whole"), kind)
    assert len(whole[0]) == 3 * STEPS
    begin = run(2, loop, str(tmp_path / "parts"), kind, **stop)
    for size in (2, 3, 1):
        folder = tmp_path / f"parts-{size}"
        shutil.copytree(tmp_path / "parts", folder)
        rest = run(size, loop, str(folder), kind, seed=99)
        assert batches(begin) + batches(rest) == batches(whole)
        if size == 2:
            for rank in range(size):
                assert begin[rank] + rest[rank] == whole[rank]


@pytest.mark.parametrize("kind", ["plain", "workers", "noise", "stream"])
@pytest.mark.parametrize(
    "stop", [{"stop_at": 2}, pytest.param({"epochs": 1}, marks=pytest.mark.nightly)]
)
def test_one_that_is_not_sharded_goes_on_bit_for_bit(tmp_path, kind, stop):
    whole = run(1, loop, str(tmp_path / "whole"), kind, is_sharded=False)
    begin = run(1, loop, str(tmp_path / "parts"), kind, **stop, is_sharded=False)
    rest = run(1, loop, str(tmp_path / "parts"), kind, is_sharded=False, seed=99)
    assert begin[0] + rest[0] == whole[0]


def test_ranks_of_other_seeds_have_the_same_batches(tmp_path):
    first, second = run(2, loop, str(tmp_path), "plain", STEPS)
    assert sorted(chain(*batches([first, second]))) == list(range(SAMPLES))


def test_an_epoch_that_was_left_early_has_ended(tmp_path):
    whole = run(2, loop, str(tmp_path / "whole"), "plain", leaves=True)
    begin = run(2, loop, str(tmp_path / "parts"), "plain", leaves=True, epochs=1)
    rest = run(2, loop, str(tmp_path / "parts"), "plain", leaves=True, seed=99)
    assert len(whole[0]) == 6
    assert begin[0] + rest[0] == whole[0]
    assert begin[1] + rest[1] == whole[1]
