"""This rank's block of every batch of a loader."""

import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import instep
from instep.errors import (
    CannotShardError,
    DisagreementError,
    DriftError,
    InstepWarning,
    ShardedTwiceError,
)
from instep.training.errors import EmptyBlockError
from instep.training.random_streams import is_deterministic
from pool import ranks, run


def numbers(n):
    return TensorDataset(torch.arange(n))


def epochs_of(kind, n, batch_size, drop_last, workers):
    """Two epochs of a sharded loader: every batch as a list, ghosts as []."""
    torch.manual_seed(instep.rank)  # ranks need not agree on anything
    data = numbers(n)
    if kind == "batch sampler":
        sampler = BatchSampler(SequentialSampler(data), batch_size, drop_last)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    else:
        order = {
            "sequential": {},
            "shuffle": {"shuffle": True},
            "subset": {"sampler": SubsetRandomSampler(range(0, n, 2))},
            "weighted": {"sampler": WeightedRandomSampler([1.0] * n, n)},
            "numpy": {"sampler": NumpySampler(n)},
        }[kind]
        loader = DataLoader(data, batch_size, drop_last=drop_last, num_workers=workers, **order)
    sharded = instep.shard(loader)
    assert len(sharded) == len(loader)
    assert sharded.dataset is data
    assert (sharded.batch_size, sharded.drop_last) == (loader.batch_size, loader.drop_last)
    from instep.training.batches.registry import find_block

    epochs = []
    for _ in range(2):
        batches = []
        for (x,) in sharded:
            torch.rand(instep.rank + 1)  # what a model draws does not move the order
            batches.append([] if find_block(x).is_empty else x.tolist())
        epochs.append(batches)
    return epochs


class NumpySampler:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        import numpy as np

        return iter(np.random.permutation(self.n).tolist())

    def __len__(self):
        return self.n


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, 0) for kind in ("sequential", "subset", "weighted", "numpy", "batch sampler")),
        *(("shuffle", workers) for workers in (0, 2)),
    ],
)
def test_the_ranks_blocks_put_together_are_the_batches_of_one_process(kind, drop_last, workers):
    args = (kind, 23, 5, drop_last, workers)
    ((first, second),) = run(1, epochs_of, *args)
    sharded = run(3, epochs_of, *args)
    for epoch, whole in enumerate((first, second)):
        together = [list(chain(*parts)) for parts in zip(*(r[epoch] for r in sharded), strict=True)]
        assert together == whole
    if kind not in ("sequential", "batch sampler"):
        assert first != second, "each epoch has an order of its own"


@ranks(2)
def test_two_shuffled_loaders_have_orders_of_their_own():
    one, other = (instep.shard(DataLoader(numbers(40), 40, shuffle=True)) for _ in range(2))
    assert next(iter(one))[0].tolist() != next(iter(other))[0].tolist()


@ranks(1, 2)
def test_sharding_twice_is_an_error():
    loader = instep.shard(DataLoader(numbers(8), 4))
    with pytest.raises(ShardedTwiceError, match=r"Call instep\.shard once"):
        instep.shard(loader)
    batch = instep.shard(torch.ones(4, 2))
    with pytest.raises(ShardedTwiceError):
        instep.shard(batch)


class Files(Dataset):
    def __init__(self, names, inner=None):
        self.names, self.inner, self.itself = names, inner, self

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return index


def shuffled(n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(instep.rank)).tolist()


def other_data(kind):
    """A loader of data that are not the same on all ranks."""
    data, rank = numbers(8), instep.rank
    if kind in ("subset", "weighted"):
        weights = [1.0] * 7 + [1.0 + rank]
        sampler = SubsetRandomSampler(shuffled(8))
        sampler = sampler if kind == "subset" else WeightedRandomSampler(weights, 8)
        return DataLoader(data, 4, sampler=sampler)
    if kind == "list":
        return DataLoader(data, batch_sampler=[[0, 1], [2, 3 + rank]])
    return DataLoader(
        {
            "length": Files(["a"] * (8 + rank)),
            "split": Subset(data, shuffled(8)),
            "values": TensorDataset(torch.arange(8.0), torch.arange(8.0) * (1 + rank)),
            "samples": shuffled(8),
            "files": Files([f"/host{rank}/{k}.jpg" for k in shuffled(8)]),
            "pairs": Files([(f"{k}.jpg", k) for k in shuffled(8)]),
            "inner": Files(["a"] * 4, Subset(data, shuffled(8))),
        }[kind],
        4,
    )


NAMED = {
    "subset": "SubsetRandomSampler.indices",
    "weighted": "WeightedRandomSampler.weights",
    "list": "the entries of the loader's list",
    "length": "the length of the Files: 8 on rank 0; 9 on rank 1",
    "split": "Subset.indices",
    "values": r"TensorDataset.tensors\[1\]",
    "samples": "the samples of the list",
    "files": "Files.names",
    "pairs": "Files.names",
    "inner": "Files.inner: Subset.indices",
}


@ranks(2)
@pytest.mark.parametrize("kind", NAMED)
def test_other_data_than_on_other_ranks_are_an_error(kind):
    with pytest.raises(DisagreementError, match=f"disagree about {NAMED[kind]}"):
        instep.shard(other_data(kind))
    local = Files([f"/host{instep.rank}/{k}.jpg" for k in range(8)])
    near = TensorDataset(torch.arange(8.0) * (1 + 1e-4 * instep.rank), torch.full((8,), torch.nan))
    for same in (local, near):
        assert len(instep.shard(DataLoader(same, 4))) == 2


@ranks(1, 2)
def test_a_sampler_that_divides_the_data_is_no_sampler_of_whole_batches():
    data = numbers(8)
    sampler = DistributedSampler(data, instep.world_size, instep.rank)
    refused = pytest.raises(CannotShardError, match="DistributedSampler divides the data")
    with refused if instep.world_size > 1 else nullcontext():
        instep.shard(DataLoader(data, 4, sampler=sampler))


class Divided(IterableDataset):
    """Yields this rank's numbers, or all of them."""

    def __init__(self, by_rank):
        self.parts = (instep.rank, instep.world_size) if by_rank else (0, 1)

    def __iter__(self):
        first, step = self.parts
        return iter(torch.arange(1.0 + first, 25, step))


@ranks(1, 2)
@pytest.mark.parametrize("by_rank", [False, True])
def test_an_iterable_dataset_that_divides_by_rank_is_refused(by_rank):
    loader = instep.shard(DataLoader(Divided(by_rank), 4))
    batches = iter(loader)
    if instep.rank == 0:
        next(batches)
    instep.barrier()
    is_refused = by_rank and instep.rank == 1
    match = "first batch .* the Divided divides the data among the ranks"
    with pytest.raises(CannotShardError, match=match) if is_refused else nullcontext():
        next(batches)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


@ranks(1, 2)
def test_what_has_no_blocks_says_why():
    with pytest.raises(CannotShardError, match="Unsized has no length"):
        instep.shard(DataLoader(Unsized(), 4, sampler=range(4)))
    with pytest.raises(CannotShardError, match="in_order=False"):
        instep.shard(DataLoader(numbers(8), 2, num_workers=1, in_order=False))
    with pytest.raises(CannotShardError, match=r"same number of rows .* got \(3,\), \(4,\)"):
        instep.shard((torch.ones(3), torch.ones(4)))
    with pytest.raises(CannotShardError, match="got int"):
        instep.shard(3)
    with pytest.raises(CannotShardError, match=r"got int\. A sampler.* is divided by its loader"):
        next(iter(instep.shard(SequentialSampler(range(9)))))


@ranks(1, 2)
def test_several_loaders_in_one_call_are_no_batch():
    loaders = [DataLoader(numbers(8), 2), DataLoader(numbers(4), 2)]
    for several in (loaders, tuple(loaders), {"train": loaders[0], "size": 2}):
        with pytest.raises(CannotShardError, match="got 2 things, a DataLoader among them"):
            instep.shard(several)
    model = nn.Linear(1, 1)
    with pytest.raises(CannotShardError, match="a Linear among them"):
        instep.shard((model, torch.optim.SGD(model.parameters(), 1)))


class Batches:
    """A loader that knows nothing of torch's."""

    name = "rows"

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(torch.arange(11)[:, None].split(4))


class Samples(Batches):
    """As a data set of the package datasets."""

    def __getitem__(self, index):
        return torch.arange(4)


@ranks(1, 2, 4)
def test_a_loader_of_another_class_is_cut_batch_by_batch():
    loader = instep.shard(Batches())
    assert (len(loader), loader.name) == (3, "rows")
    for _ in range(2):
        with torch.no_grad():
            found = [instep.gather_rows(x) for x in loader]
        assert torch.cat(found).flatten().tolist() == [*range(11)]
    with pytest.raises(ShardedTwiceError):
        instep.shard(loader)


@ranks(1, 2)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("iterator", "a batch is tensors"),
        ("string", "a batch is tensors"),
        ("set", "a batch is tensors"),
        ("data set", r"instep\.shard\(DataLoader\(dataset, batch_size\)\)"),
        ("samples", "a batch is tensors"),
        ("model", r"instep\.replicate\(model\)"),
    ],
)
def test_what_is_neither_a_loader_nor_a_batch_is_refused(kind, said):
    what = {
        "iterator": iter(Batches()),
        "data set": Endless(),
        "samples": Samples(),
        "string": "rows",
        "set": {1, 2},
        "model": torch.nn.Linear(1, 1),
    }
    with pytest.raises(CannotShardError, match=said):
        instep.shard(what[kind])


@ranks(2, 3)
def test_a_batch_by_hand_is_cut_in_place():
    x = torch.arange(7)
    mine, nested = instep.shard((x, {"y": x * 2}))
    r, n = instep.rank, instep.world_size
    assert mine.tolist() == list(range(r * 7 // n, (r + 1) * 7 // n))
    assert torch.equal(nested["y"], mine * 2)
    assert mine.data_ptr() == x.data_ptr() + x.element_size() * (r * 7 // n)


@ranks(2, 3)
def test_lists_of_a_batch_are_cut_as_its_tensors_are():
    texts = list("abcdefg")
    mine = instep.shard({"x": torch.arange(7), "text": texts, "of all": ["two", "words"]})
    assert mine["text"] == [texts[k] for k in mine["x"].tolist()]
    assert mine["of all"] == ["two", "words"]
    assert instep.shard(texts) == mine["text"]


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    names: list[str]


COLLATES = {
    "dataclass": lambda xs, names: Record(torch.stack(xs), names),
    "list of tensors": lambda xs, names: {"x": xs, "names": names},
    "tuple of dicts": lambda xs, names: ([{"x": x} for x in xs], tuple(names)),
    "samples": lambda xs, names: list(zip(xs, names, strict=True)),
}
READS = {
    "dataclass": lambda batch: (batch.x, batch.names),
    "list of tensors": lambda batch: (batch["x"], batch["names"]),
    "tuple of dicts": lambda batch: ([each["x"] for each in batch[0]], batch[1]),
    "samples": lambda batch: zip(*batch, strict=True),
}


class Named(IterableDataset):
    """Samples of three rows, as images have channels."""

    def __iter__(self):
        return iter([(torch.full((3, k % 2 + 1), float(k)), f"n{k}") for k in range(11)])


class Even(Named):
    def __iter__(self):
        return iter([(x[:, :1], name) for x, name in super().__iter__()])


@ranks(2, 4)
@pytest.mark.parametrize("kind", COLLATES)
def test_batches_of_an_iterable_dataset_may_be_dataclasses_or_lists_of_samples(kind):
    data = Even() if kind == "dataclass" else Named()
    collate = COLLATES[kind]
    loader = DataLoader(data, 4, collate_fn=lambda s: collate(*map(list, zip(*s, strict=True))))
    found, epoch = [], instep.shard(loader)
    with torch.no_grad():
        for batch in epoch:
            xs, names = READS[kind](batch)
            found += [(int(x[2, 0]), name) for x, name in zip(xs, names, strict=True)]
    of_all = instep.all_gather_object(found)
    assert sorted(each for of_rank in of_all for each in of_rank) == [
        (k, f"n{k}") for k in range(11)
    ]


@ranks(2)
def test_images_with_more_channels_than_there_are_of_them_are_samples():
    loader = DataLoader(Named(), 2, collate_fn=lambda samples: [x for x, _ in samples])
    with torch.no_grad():
        found = [(x.shape[0], int(x[0, 0])) for batch in instep.shard(loader) for x in batch]
    of_all = instep.all_gather_object(found)
    assert sorted(chain(*of_all)) == [(3, k) for k in range(11)]


class Pairs(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((1,), float(k)), torch.full((1,), -float(k))) for k in range(5)])


@ranks(2)
def test_two_columns_are_no_list_of_two_samples_where_a_batch_has_two_rows():
    with torch.no_grad():
        rows = [(x.tolist(), y.tolist()) for x, y in instep.shard(DataLoader(Pairs(), 2))]
    assert all(y == [[-value] for (value,) in x] for x, y in rows)
    assert sum(len(x) for x, _ in rows) == (2 if instep.rank == 0 else 3)


@ranks(2)
def test_a_list_of_batches_that_is_taken_for_one_batch_is_warned_of():
    def pairs(*lengths):
        return [(torch.ones(length, 2), torch.ones(length)) for length in lengths]

    with pytest.warns(InstepWarning, match="one batch of 3 samples"):
        instep.shard(pairs(5, 5, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lengths in [(5, 3, 2), (5, 5, 5), (2, 5)]:  # sequences, columns
            instep.shard(pairs(*lengths))


@ranks(2)
def test_lists_that_may_be_read_in_two_ways_are_refused():
    pairs = [(torch.ones(2), torch.ones(3)), (torch.ones(4), torch.ones(5))]
    with pytest.raises(CannotShardError, match="or use a map-style data set"):
        instep.shard(pairs)


@ranks(2)
def test_a_generator_of_the_loaders_own_is_rank_0s():
    own = torch.Generator().manual_seed(instep.rank)
    (x,) = next(iter(instep.shard(DataLoader(numbers(40), 40, shuffle=True, generator=own))))
    assert sorted(chain(*instep.all_gather_object(x.tolist()))) == list(range(40))


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index // (7 - index)


@ranks(1, 2)
def test_a_dataset_that_fails_does_so_in_the_loop():
    batches = iter(instep.shard(DataLoader(Broken(), 4)))
    next(batches)
    if instep.rank == instep.world_size - 1:
        with pytest.raises(ZeroDivisionError):
            next(batches)


@ranks(1, 2)
def test_loaders_of_whole_batches_keep_their_length_and_may_be_iterated_by_hand():
    rows = torch.arange(12).view(3, 4)
    loader = instep.shard(DataLoader(rows, batch_size=None))
    assert len(loader) == 3
    for sharded in (loader, instep.shard(DataLoader(numbers(3), 2))):
        batches = iter(sharded)
        assert iter(batches) is batches
    mine = slice(instep.rank * 4 // instep.world_size, (instep.rank + 1) * 4 // instep.world_size)
    assert [x.tolist() for x in loader] == [row[mine] for row in rows.tolist()]


class Unreadable(Dataset):
    """A data set whose last sample rank 0 cannot read."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 4 and instep.rank == 0:
            raise OSError("unreadable")
        return torch.full((2,), float(index))


@ranks(2)
def test_a_ghost_that_cannot_be_read_leaves_the_batch_before_it_as_it_was():
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    (first, ghost) = list(instep.shard(DataLoader(Unreadable(), 4)))
    model(first).mean().backward()
    whole = torch.arange(4.0).mean()
    torch.testing.assert_close(model.weight.grad, whole.expand(1, 2))
    model.zero_grad()
    model(ghost).mean().backward()  # rank 0 has no row of it, rank 1 the sample 4
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 4.0))


def test_samples_in_memory_have_nothing_random_in_a_part_of_them_either():
    class Random(Dataset):
        def __getitem__(self, index):
            return torch.rand(1)

    assert is_deterministic(Subset(Subset(numbers(4), [0, 1]), [1]))
    assert not is_deterministic(Subset(Random(), [0]))


@ranks(2)
@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_loader_that_only_one_rank_has_looked_at_is_an_error(is_sliced):
    """It would be in another order there in each epoch that follows."""
    data = TensorDataset(torch.arange(12.0).view(12, 1))
    whole = DataLoader(
        Streaming(data) if is_sliced else data, 2, shuffle=None if is_sliced else True
    )
    loader = instep.shard(whole)
    model = instep.replicate(nn.Linear(1, 1))
    if instep.rank == 0:
        with torch.no_grad():
            next(iter(loader))
    with pytest.raises(DriftError, match=r"different epochs of a loader .rank 0: 2; rank 1: 1"):
        train_an_epoch(model, loader)


class Streaming(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def train_an_epoch(model, loader):
    for batch in loader:
        model(batch[0]).sum().backward()


@ranks(2)
def test_strings_and_arrays_of_a_batch_are_cut_as_its_tensors_are():
    rows = torch.arange(5)
    batch = {
        "x": rows,
        "names": ("a", "b", "c", "d", "e"),
        "array": rows.numpy(),
        "of the batch": (5, np.zeros(2), "train"),
    }
    shard = instep.shard(batch)
    block = range(*((0, 2) if instep.rank == 0 else (2, 5)))
    assert shard["x"].tolist() == shard["array"].tolist() == list(block)
    assert shard["names"] == tuple("abcde"[k] for k in block)
    assert shard["of the batch"][0] == 5
    assert shard["of the batch"][1].shape == (2,)
    assert shard["of the batch"][2] == "train"


class Noisy(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index + torch.rand(3 + index)[-1]


def with_a_number_of_the_batch(samples):
    return torch.stack([*samples]), np.random.rand() + torch.rand(())


def drawn_for_batches(workers):
    """In two epochs, of which the first is left after a batch: samples, and batches' numbers."""
    torch.manual_seed(3)
    data = DataLoader(
        Noisy(), 4, shuffle=True, collate_fn=with_a_number_of_the_batch, num_workers=workers
    )
    loader = instep.shard(data)
    _, first = next(iter(loader))
    state = loader.state_dict()
    loader = instep.shard(data)
    loader.load_state_dict(state)
    numbers, rows = [first.item()], []
    for _ in range(2):
        for x, number in loader:
            numbers.append(number.item())
            rows += instep.gather_rows(x).tolist()
    assert len({*numbers}) == len(numbers) == 6
    return numbers, rows


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collate_fn_draws_is_a_function_of_the_batch(workers):
    (whole,) = run(1, drawn_for_batches, workers)
    for size in (2, 3):
        assert run(size, drawn_for_batches, workers) == [whole] * size


def none_left(samples):
    return default_collate([sample for sample in samples if sample > 3])


def stacked(samples):
    return torch.stack([sample for sample in samples if sample > 3])


def transposed(samples):
    _, xs = zip(*((sample, sample) for sample in samples if sample > 3), strict=True)
    return torch.stack(xs)


def broken(samples):
    return samples[0][7]


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("collate", [none_left, stacked, transposed])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_that_leaves_none_of_a_ranks_samples_is_named(collate, workers):
    data = DataLoader(torch.arange(8.0), 8, collate_fn=collate, num_workers=workers)
    if instep.rank == 0:
        with pytest.raises(EmptyBlockError, match=r"all of rank 0's samples of a batch \(4\)"):
            next(iter(instep.shard(data)))
    else:
        assert next(iter(instep.shard(data))).tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.slow
@ranks(2)
def test_other_errors_of_a_collate_fn_are_raised_as_they_are():
    with pytest.raises(IndexError):
        next(iter(instep.shard(DataLoader(torch.arange(8.0), 8, collate_fn=broken))))


class OneIsMissing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise FileNotFoundError("no file")
        return float(index)


def load_what_is_missing(workers):
    loop = iter(instep.shard(DataLoader(OneIsMissing(), 8, num_workers=workers)))
    with pytest.raises(FileNotFoundError) as caught:
        next(loop)
    lines = "".join(traceback.format_exception(caught.value))
    return lines[lines.index("dataset.__getitems__") :]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_sample_names_the_sample_and_no_frame_of_ours(workers):
    (text,) = run(1, load_what_is_missing, workers)
    assert "This was sample 5 of the data set." in text
    assert "random_streams.py" not in text
