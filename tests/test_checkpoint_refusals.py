"""What a checkpoint is not loaded into: other data, other names, and metrics of other libraries."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import instep
from instep.errors import CannotSaveError, OtherDataError, OtherModelError
from pool import run


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(range(self.samples))


def make(kind, samples):
    if kind == "map-style":
        return DataLoader(TensorDataset(torch.arange(samples)), 4)
    if kind == "sharded":
        return instep.shard(DataLoader(TensorDataset(torch.arange(samples)), 4))
    loader = DataLoader(Stream(samples), 4)
    return loader if kind == "stream" else instep.shard(loader)


def take(folder, kind, samples, stop_at):
    """Loop over a loader; the error of a resume, if there is one."""
    loader = make(kind, samples)
    checkpoint = instep.Checkpoint(folder, loader=loader, every=1)
    try:
        for _ in checkpoint.epochs(1):
            for _ in loader:
                checkpoint.step()
                if checkpoint.steps == stop_at:
                    return None
    except OtherDataError as error:
        return str(error)
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("map-style", "epoch of 22 samples in batches of 4; the loader has 6 samples"),
        ("stream", "after 3 batches of an epoch, .* 2 batches were passed over"),
        ("sharded stream", "after 12 samples of an epoch, .* 6 samples were passed over"),
    ],
)
def test_a_loader_of_other_data_in_mid_epoch(tmp_path, kind, text):
    assert run(2, take, str(tmp_path), kind, 22, 3) == [None, None]
    for raised in run(2, take, str(tmp_path), kind, 6, None):
        assert re.search(text, raised)


def take_epochs(folder, kind, samples, epochs):
    """How many samples of rank 0's and rank 1's each epoch from the checkpoint on has."""
    loader = make(kind, samples)
    checkpoint = instep.Checkpoint(folder, loader=loader)
    taken = []
    for _ in checkpoint.epochs(epochs):
        batches = [batch[0] if isinstance(batch, list) else batch for batch in loader]
        taken.append(int(instep.all_reduce(torch.tensor(sum(map(len, batches))))))
        checkpoint.save()
    checkpoint.close()
    return taken


def test_between_two_epochs_the_data_may_change(tmp_path):
    assert run(2, take_epochs, str(tmp_path), "sharded", 22, 1) == [[22]] * 2
    assert run(2, take_epochs, str(tmp_path), "sharded", 18, 3) == [[18, 18]] * 2


def test_a_loader_without_an_order(tmp_path):
    loader = DataLoader(TensorDataset(torch.arange(4)), 2, in_order=False)
    with pytest.raises(ValueError, match="gives its batches in no order"):
        instep.Checkpoint(tmp_path, loader=loader)


def save_or_resume(folder, key):
    checkpoint = instep.Checkpoint(folder, model={"gen": nn.Linear(1, 1), key: nn.Linear(1, 1)})
    try:
        if not checkpoint.resume():
            checkpoint.save()
    except OtherModelError as error:
        return str(error)
    finally:
        checkpoint.close()


def test_a_dict_with_other_keys(tmp_path):
    assert run(2, save_or_resume, str(tmp_path), "dis") == [None, None]
    for text in run(2, save_or_resume, str(tmp_path), "critic"):
        assert "another model: it lacks: critic; only it has: dis" in text


class Score:
    """A metric of another library, whose state no one else can divide."""

    def __init__(self):
        self.state = {"right": instep.rank}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


def count(folder):
    metric = Score()
    checkpoint = instep.Checkpoint(folder, metrics={"accuracy": metric})
    try:
        if not checkpoint.resume():
            checkpoint.save()
    except CannotSaveError as error:
        return str(error)
    finally:
        checkpoint.close()
    return metric.state


def test_a_metric_of_another_library_at_another_number_of_ranks(tmp_path):
    for _ in range(2):
        assert run(2, count, str(tmp_path)) == [{"right": 0}, {"right": 1}]
    for text in run(3, count, str(tmp_path)):
        assert "a Score had on 2 ranks, and there are 3 now" in text


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"step": 5}, r"step is a int, which has no state_dict\(\) .*; give it both"),
        ({"loader": range(3)}, r"loader is a range, .*; instep\.shard\(loader\) has them"),
        ({"models": [nn.Linear(1, 1), 5]}, r"models\[1\] is a int, which has no state_dict"),
    ],
)
def test_an_object_without_a_state_is_named(tmp_path, objects, said):
    with pytest.raises(CannotSaveError, match=said):
        instep.Checkpoint(str(tmp_path), **objects)
