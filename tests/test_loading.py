"""Each rank loads its own rows of a batch, and every loop gets the batch of plain Python."""

import cProfile
import io
import os
import pickle
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import deque, namedtuple
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from itertools import islice, product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import forked_jobs
import instep
from instep.distributed.watchdog.signals.rank_signals import rank_signals
from instep.errors import DisagreementError, LoadingError
from instep.process.patching import PatchHandle, replaced
from instep.unedited.data import loaders
from instep.unedited.data.exchange_policy import ExchangePolicy, is_exchange_faster
from instep.unedited.data.generators import find_generator
from instep.unedited.data.known_datasets import known_dataset
from instep.unedited.data.loader_patch import LOADER_PATCH
from instep.unedited.data.loaders import iterate
from instep.unedited.data.row_loading import RowDataset, RowRequest
from instep.unedited.data.sample_loading import counting_calls
from instep.unedited.patch_table import SHARDED_CALL_PATCHES
from pool import ranks, run

Pair = namedtuple("Pair", "x y")


def batches(loader):
    """The loader's batches as the divided script gets them."""
    return iterate(type(loader).__iter__, loader)


def fresh():
    """Equal numbers on every rank, as a session begins."""
    torch.manual_seed(5)
    np.random.seed(5)
    np.random.randn()  # keeps another one back
    random.seed(5)


def streams():
    """The next numbers that the script would draw."""
    return torch.rand(1).item(), np.random.randn(), np.random.rand(), random.random()


def same(one, other):
    """Whether two batches are the same: types, dtypes, shapes, strides, bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        like = one.dtype == other.dtype and one.stride() == other.stride()
        return like and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Counting(Dataset):
    """Knows which samples this process has loaded, by a queue, into which instep does not look."""

    def __init__(self, n, make=lambda index: (torch.full((2, 3), float(index)), index)):
        self.n, self.make, self._loaded = n, make, queue.SimpleQueue()

    @property
    def loaded(self):
        return [self._loaded.get() for _ in range(self._loaded.qsize())]

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self._loaded.put(index)
        return self.make(index)


SAMPLERS = {
    "sequential": lambda data: {"batch_size": 5},
    "shuffled": lambda data: {"batch_size": 5, "shuffle": True},
    "dropped": lambda data: {"batch_size": 5, "shuffle": True, "drop_last": True},
    "of one": lambda data: {"batch_size": 1},
    "a generator's": lambda data: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
    },
    "weighted": lambda data: {"batch_size": 5, "sampler": WeightedRandomSampler([1.0] * 23, 23)},
    "subset": lambda data: {"batch_size": 5, "sampler": SubsetRandomSampler(range(0, 23, 2))},
    "batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 7, False)},
    "numpy's": lambda data: {"batch_sampler": np.random.permutation(20).reshape(4, 5).tolist()},
    "one by one": lambda data: {"batch_size": None},
}


@ranks(1, 3)
def test_what_draws_nothing_is_bit_equal_to_plain_python():
    for name, sampler in SAMPLERS.items():
        epochs, after = [], []
        for way in (iter, batches):
            fresh()
            data = Counting(23)
            loader = DataLoader(data, **sampler(data))
            epochs.append([list(way(loader)) for _ in range(2)])
            after.append(streams())
        assert same(*epochs), name
        assert after[0] == after[1], name
        assert loader.dataset is data


@ranks(1, 2)
def test_a_pass_over_a_loader_knows_how_many_batches_it_has():
    for workers in (0, 2):
        loader = DataLoader(Counting(23), 5, num_workers=workers)
        plain, ours = iter(loader), batches(loader)
        assert len(plain) == len(ours) == len(loader) == 5
        next(ours)
        assert len(ours) == 5


@ranks(2, 3)
def test_each_rank_loads_its_own_rows_only():
    data = Counting(24)
    data.make = lambda index: torch.full((1 << 18,), float(index))  # too costly to load twice
    loader = DataLoader(data, 12)
    list(batches(loader))
    n, r = instep.world_size, instep.rank
    own = [b + k for b in (0, 12) for k in range(r * 12 // n, (r + 1) * 12 // n)]
    proofs = [b + (r + 1) % n * 12 // n for b in (0, 12)]
    assert sorted(data.loaded) == sorted(own + proofs)


def pair(index):
    return Pair(torch.ones(2) * index, index)


KINDS = {
    "numbers": lambda i: i,
    "truth": lambda i: i % 2 == 0,
    "fractions": lambda i: i / 3,
    "texts": lambda i: f"sample {i}",
    "bytes": lambda i: (b"x" * i, 1),
    "arrays": lambda i: (np.arange(6.0).reshape(2, 3) * i, np.float32(i), np.int16(i)),
    "dicts": lambda i: {"x": torch.ones(3) * i, "meta": {"name": str(i), 3: [i, (i, 0.5)]}},
    "named": pair,
    "channels last": lambda i: torch.arange(24.0).view(2, 4, 3).permute(2, 0, 1) * i,
    "slices": lambda i: torch.arange(24.0).view(4, 6)[:, ::2] + i,
    "scalars": lambda i: torch.tensor(i),
    "nothing": lambda i: torch.empty(0, 3),
    "half": lambda i: torch.ones(3, dtype=torch.bfloat16) * i,
    "complex": lambda i: torch.ones(3, dtype=torch.complex64) * i,
    "conjugates": lambda i: (torch.ones(3, dtype=torch.complex64) * 1j * i).conj(),
    "mixed numbers": lambda i: i if i < 4 else i / 3,
    "mixed dtypes": lambda i: torch.ones(3, dtype=torch.int64 if i % 3 else torch.float32) * i,
    "mixed and nested": lambda i: {"x": [i if i % 3 else 0.5, f"{i}"], 3: np.ones(2) * i},
    "empty": lambda i: (),
}


@pytest.mark.slow
@ranks(1, 3)
def test_samples_of_any_kind_arrive_as_they_were():
    for collate, size in product((None, list), (5, 2)):
        for name, kind in KINDS.items():
            plain, divided = (
                list(way(DataLoader(Counting(8, kind), size, collate_fn=collate)))
                for way in (iter, batches)
            )
            assert same(plain, divided), (name, collate, size)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@ranks(3)
def test_a_collate_fn_sees_the_whole_batch():
    def load(way):
        data = Counting(13, lambda i: torch.arange(i % 7 + 1))
        return list(way(DataLoader(data, 5, collate_fn=padded)))

    assert same(load(batches), load(iter))


@ranks(2)
def test_samples_that_cannot_travel_are_loaded_by_every_rank():
    def load(way):
        loader = DataLoader(Counting(8, lambda i: lambda: i), 4, collate_fn=called)
        return [list(way(loader)) for _ in range(2)]

    said = io.StringIO()
    with redirect_stderr(said):
        assert same(load(batches), load(iter))
    line = (
        "instep: data set Counting: each rank loads all of it: a sample cannot be sent, it does not"
    )
    assert said.getvalue().startswith(line) == (instep.rank == 0)


def called(samples):
    return [sample() for sample in samples]


class Noisy(Dataset):
    """Draws from every global generator, as augmentations do."""

    def __init__(self, n=23):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        drawn = torch.rand(2), np.random.rand(), random.random()
        return torch.tensor([index, *drawn[0], *drawn[1:]])


def noisy_epochs(workers, context, persistent):
    fresh()
    more = {"persistent_workers": persistent, "multiprocessing_context": context} if workers else {}
    loader = DataLoader(Noisy(), 5, shuffle=True, num_workers=workers, **more)
    epochs = [torch.cat(list(batches(loader))) for _ in range(2)]
    loader._iterator = None
    return epochs, streams()


@pytest.mark.parametrize(
    ("workers", "context", "persistent"),
    [
        (0, None, False),
        (2, "fork", False),
        (2, "fork", True),
        pytest.param(1, "spawn", True, marks=pytest.mark.nightly),
    ],
)
def test_what_is_random_in_a_sample_depends_on_its_place_only(workers, context, persistent):
    ((one, after),) = run(1, noisy_epochs, workers, context, persistent)
    size = 2 if context == "spawn" else 3
    for epochs, theirs in run(size, noisy_epochs, workers, context, persistent):
        assert all(map(torch.equal, epochs, one))
        assert theirs == after
    first, second = (dict(zip(e[:, 0].tolist(), e[:, 1:].tolist(), strict=True)) for e in one)
    assert all(first[index] != second[index] for index in first), "each epoch draws anew"
    drawn = [tuple(rest) for rest in first.values()]
    assert len(set(drawn)) == len(drawn), "each sample draws its own"


FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
WORKERS = {
    "forked": FORKED,
    "persistent": {**FORKED, "persistent_workers": True, "prefetch_factor": 3},
    "collating": {**FORKED, "collate_fn": list},
    "pinned": {**FORKED, "pin_memory": True},
}


def square(index):
    return {"x": torch.ones(3) * index**2, "name": str(index)}


@pytest.mark.slow
@ranks(2)
def test_workers_load_their_ranks_rows():
    warnings.filterwarnings("ignore", "'pin_memory'")  # there may be no device to pin for
    for name, more in WORKERS.items():
        results = []
        for way in (iter, batches):
            fresh()
            loader = DataLoader(Counting(23, square), 5, shuffle=True, **more)
            epochs = [list(way(loader)) for _ in range(2)]
            results.append((epochs, streams()))
            loader._iterator = None
        (plain, before), (divided, after) = results
        assert same(plain, divided), name
        assert before == after, name


class Opened(Counting):
    """Is made ready in a worker."""

    def __getitem__(self, index):
        return self.base + index


def open_in_worker(worker):
    get_worker_info().dataset.base = 100


@ranks(2)
def test_a_worker_init_fn_sees_the_scripts_data_set():
    loader = DataLoader(Opened(6), 3, worker_init_fn=open_in_worker, **FORKED)
    assert [batch.tolist() for batch in batches(loader)] == [[100, 101, 102], [103, 104, 105]]


@ranks(2)
def test_loops_may_stop_anywhere_and_go_on_side_by_side():
    def load(way):
        fresh()
        data = Counting(23)
        loader = DataLoader(data, 5, shuffle=True)
        seen = [next(way(loader)), next(way(loader))]
        for k, batch in enumerate(way(loader)):
            seen.append(batch)
            if k == 1:
                break
        seen += zip(way(loader), way(DataLoader(data, 3)), strict=False)
        for batch in way(loader):
            seen += [batch, list(way(DataLoader(data, 11)))]
        endless = RandomSampler(data, replacement=True, num_samples=10**10)
        seen += islice(way(DataLoader(data, 4, sampler=endless)), 3)
        data.make = lambda index: torch.ones(index % 2 + 1)
        seen += way(DataLoader(data, 1))
        return seen, streams()

    assert same(load(batches), load(iter))


def broken_at(bad, error):
    def make(index):
        if index in bad:
            raise error(f"no picture {index}")
        return index

    return make


class PickyError(Exception):
    """Does not pickle as what it is."""

    def __init__(self, text):
        super().__init__(text, threading.Lock())


@pytest.mark.parametrize("more", [{}, FORKED], ids=["here", "in workers"])
@ranks(1, 2)
def test_the_first_error_of_a_batch_is_raised_on_every_rank_and_the_loop_may_go_on(more):
    def load(way):
        loop = way(DataLoader(Counting(12, broken_at((5, 6, 7), KeyError)), 4, **more))
        first = next(loop)
        with pytest.raises(KeyError) as caught:
            next(loop)
        named = re.findall(r"no picture \d|in DataLoader worker process \d", str(caught.value))
        return first, named, list(loop)

    plain, divided = load(iter), load(batches)
    assert same(plain, divided), (plain, divided)
    with pytest.raises((PickyError, LoadingError), match="no picture 5"):
        list(batches(DataLoader(Counting(12, broken_at((5, 7), PickyError)), 4)))


class LeaveError(BaseException):
    """No Exception, as SystemExit is none."""


@pytest.mark.parametrize("error", [LeaveError, SystemExit, KeyboardInterrupt])
@ranks(2)
def test_what_is_no_exception_is_raised_on_every_rank_too(error):
    def load(way):
        loop = way(DataLoader(Counting(12, broken_at((5, 7), error)), 4))
        first = next(loop)
        with pytest.raises(error, match="no picture 5"):
            next(loop)
        return first, list(loop)

    with replaced((rank_signals, "process", os.getpid())):  # as in a job, which handles Ctrl-C
        assert same(load(iter), load(batches))


@ranks(2)
def test_what_a_sampler_raises_is_raised_on_every_rank():
    class Numbers(list):
        def __iter__(self):
            yield from range(6)
            sys.exit("no picture 6")

    def load(way):
        loop = way(DataLoader(Counting(12, lambda index: index), 4, sampler=Numbers(range(8))))
        first = next(loop)
        with pytest.raises(SystemExit, match="no picture 6"):
            next(loop)
        return first, instep.all_gather(torch.ones(1))

    assert same(load(iter), load(batches))


@ranks(2)
def test_an_error_names_the_sample_and_the_rank_that_loaded_it():
    with pytest.raises(OSError, match="no picture 3") as caught:
        list(batches(DataLoader(Counting(4, broken_at((3,), OSError)), 4)))
    notes = "".join(caught.value.__notes__)
    assert "This was sample 3 of Counting." in notes
    assert ("On rank 1, which loaded it" in notes) == (instep.rank == 0)


FAILING_LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Broken(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == {index}:
            raise ValueError(f"no picture {{index}}")
        return torch.ones(4 + (index == 13))

if __name__ == "__main__":
    for _ in DataLoader(Broken(), 8, num_workers={workers}):
        pass
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("index", "workers"),
    [
        pytest.param(3, 0, id="rank 0", marks=pytest.mark.nightly),
        pytest.param(5, 0, id="rank 1", marks=pytest.mark.nightly),
        pytest.param(5, 1, id="a worker of rank 1"),
        pytest.param(99, 1, id="collating", marks=pytest.mark.nightly),
    ],
)
def test_a_traceback_from_a_loader_has_no_frame_of_instep(tmp_path, index, workers):
    script = tmp_path / "train.py"
    script.write_text(FAILING_LOADER.format(index=index, workers=workers))
    plain = [sys.executable, script]
    alone = subprocess.run(plain, capture_output=True, text=True, check=False).stderr
    done = forked_jobs.run("run", "-n", "2", script).stderr
    assert "/src/instep/" not in done
    assert (done.count("__getitem__"), done.count("Traceback")) == (
        alone.count("__getitem__"),
        2 if index == 5 else 1,
    )
    assert alone.rstrip().splitlines()[-1] in done.splitlines()


@ranks(2)
def test_ranks_that_mean_different_samples_say_so():
    order = torch.randperm(20, generator=torch.Generator().manual_seed(instep.rank)).tolist()
    with pytest.raises(DisagreementError, match="samples of the next batch"):
        list(batches(DataLoader(Counting(20), 5, sampler=order)))
    with pytest.raises(DisagreementError, match="none left"):
        list(batches(DataLoader(Counting(20), 5, sampler=range(5 * (instep.rank + 1)))))


class SometimesNoisy(Noisy):
    """Draws for some samples only, and fails by chance."""

    def __getitem__(self, index):
        if index % 5 == 4 and random.random() < 0.3:
            raise ValueError(f"bad luck at {index}")
        return index, torch.rand(1) if index % 4 == 3 else torch.zeros(1)


def lucky_batches():
    fresh()
    loop, seen = batches(DataLoader(SometimesNoisy(40), 5)), []
    while True:
        try:
            seen.append(next(loop))
        except ValueError as error:
            seen.append(str(error))
        except StopIteration:
            return seen, streams()


@pytest.mark.slow
def test_samples_of_which_some_are_random_do_not_depend_on_the_ranks_either():
    (alone,) = run(1, lucky_batches)
    assert 0 < sum(isinstance(batch, str) for batch in alone[0]) < 8
    for other in run(3, lucky_batches):
        assert same(other, alone)


class OwnGenerator(Noisy):
    def __init__(self):
        super().__init__()
        self.transforms = [Jitter(np.random.default_rng(7))]

    def __getitem__(self, index):
        return self.transforms[0](index)


class Jitter:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, index):
        return index + self.rng.random()


GENERATOR = np.random.default_rng(1)


def draw():
    return GENERATOR.random()


def test_generators_of_a_data_sets_own_are_found():
    assert find_generator(OwnGenerator()) == "self.transforms[0].rng"
    assert find_generator(Counting(1, lambda index: draw() + index)) == "GENERATOR"
    assert find_generator(Counting(1, partial(torch.rand, generator=torch.Generator()))) is not None
    assert find_generator(Noisy()) is None
    assert find_generator(Counting(1)) is None
    wrapped = Noisy()
    wrapped.rng = np.random.mtrand._rand
    wrapped.itself = wrapped
    wrapped.paths = [str(k) for k in range(10**5)]
    assert find_generator(wrapped) is None


@ranks(2)
def test_a_data_set_with_a_generator_of_its_own_is_loaded_whole():
    def load(way):
        return list(way(DataLoader(OwnGenerator(), 5)))

    said = io.StringIO()
    with redirect_stderr(said):
        assert same(load(batches), load(iter))
    assert ("it draws from a generator of its own" in said.getvalue()) == (instep.rank == 0)


@ranks(2)
def test_a_new_loader_for_each_pass_knows_what_the_last_one_learned():
    data, said = Counting(12), io.StringIO()
    policies = []
    with redirect_stderr(said):
        for _ in range(2):
            loader = DataLoader(data, batch_size=4)
            assert len(list(batches(loader))) == 3
            policies.append(known_dataset(loader).policies[0, 4])
        assert policies[0] is policies[1]
        assert policies[0]._batches == 6
        for _ in range(2):
            list(batches(DataLoader(own := OwnGenerator(), batch_size=4)))
            list(batches(DataLoader(own, batch_size=4)))
    assert said.getvalue().count("generator of its own") == (2 if instep.rank == 0 else 0)


@ranks(2)
def test_what_one_rank_finds_in_a_data_set_counts_for_all():
    def find(_):
        return "self.rng" if instep.rank == 1 else None

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said := io.StringIO()):
        patch.setattr(loaders, "find_generator", find)
        data = Counting(8)
        list(batches(DataLoader(data, 4)))
    assert data.loaded == list(range(8))
    assert ("(self.rng)" in said.getvalue()) == (instep.rank == 0)


class Forgetless(Noisy):
    """Each sample depends on how many came before."""

    calls = 0

    def __getitem__(self, index):
        self.calls += 1
        return torch.tensor(index + self.calls / 100)


@ranks(2)
def test_a_data_set_with_a_hidden_state_gives_every_rank_the_same_and_a_line_says_so():
    said = io.StringIO()
    with redirect_stderr(said):
        (batch,) = batches(DataLoader(Forgetless(6), 6))
    assert len({tuple(other.tolist()) for other in instep.all_gather_object(batch)}) == 1
    line = "instep: data set Forgetless: its samples depend on the rank that loads them"
    assert (line in said.getvalue()) == (instep.rank == 0)


class Tallied(Noisy):
    """Counts its samples, and writes a line about each."""

    def __init__(self, n, file):
        super().__init__(n)
        self.calls, self.file = 0, file

    def __getitem__(self, index):
        self.calls += 1
        self.file.write(f"{index}\n")
        return torch.tensor(index)


@ranks(1, 3)
def test_what_loading_changes_is_changed_by_every_rank():
    with tempfile.TemporaryFile("w+") as file, redirect_stderr(said := io.StringIO()):
        data = Tallied(14, file)
        loader = DataLoader(data, 5, shuffle=True)
        for epoch in (1, 2):
            assert torch.cat(list(batches(loader))).sort().values.equal(torch.arange(14))
            assert data.calls == epoch * 14
            file.seek(0)
            assert sorted(map(int, file.read().split())) == sorted([*range(14)] * epoch)
    line = "instep: data set Tallied: each rank loads all of it: loading a sample changes Tallied."
    assert (line in said.getvalue()) == (instep.rank == 0 and instep.world_size > 1)


class Tally:
    __slots__ = ("calls", "table")

    def __init__(self):
        self.calls, self.table = 0, {"calls": 0}


class TalliedInside(Noisy):
    """Counts its samples in an object that it holds, or in a dict of that."""

    def __init__(self, n, by_table):
        super().__init__(n)
        self.tallies, self.by_table = [Tally()], by_table

    def __getitem__(self, index):
        (tally,) = self.tallies
        if self.by_table:
            tally.table["calls"] += 1
        else:
            tally.calls += 1
        return torch.tensor(index)


@ranks(1, 3)
def test_what_loading_counts_in_an_object_of_the_data_set_every_rank_counts():
    for by_table in (False, True):
        data = TalliedInside(14, by_table)
        with redirect_stderr(said := io.StringIO()):
            list(batches(DataLoader(data, 5)))
        (tally,) = data.tallies
        assert (tally.table["calls"] if by_table else tally.calls) == 14
        what = ".table['calls']" if by_table else ".calls"
        line = f"loading a sample changes TalliedInside.tallies[0]{what}."
        assert (line in said.getvalue()) == (instep.rank == 0 and instep.world_size > 1)


kept_by_all = []


class Keeping(Noisy):
    """Keeps what it has loaded, some of it only, in containers of its own and of its module."""

    def __init__(self, n):
        super().__init__(n)
        self.listed, self.named, self.last = [], {}, deque(maxlen=3)
        self.times, self.numbers = [0] * 300, set()

    def __getitem__(self, index):
        if index % 4 == 3:
            self.listed.append(index)
            self.named[f"{index}"] = index
            self.last.append(index)
            self.numbers.add(index)
            kept_by_all.append(index)
            self.times[index] += 1
        return torch.tensor(index) + (torch.rand(()) if index == 13 else 0)


class OfLibrary(Keeping):
    """As a class of an installed package."""

    __module__ = "torch"


class Weighing(Noisy):
    """Counts its samples in an array, or in a tensor."""

    def __init__(self, n, counts):
        super().__init__(n)
        self.counts = counts

    def __getitem__(self, index):
        self.counts[index] += 1
        return torch.tensor(index)


class WeighingInOrder(Weighing):
    """Lists them, too."""

    def __init__(self, n, counts):
        super().__init__(n, counts)
        self.listed = []

    def __getitem__(self, index):
        self.listed.append(index)
        return super().__getitem__(index)


@ranks(1, 3)
def test_what_loading_lists_and_counts_in_an_array_every_rank_has_in_order():
    for counts in (np.zeros(30), np.zeros(3000), torch.zeros(30)):
        data = WeighingInOrder(30, counts)
        with redirect_stderr(io.StringIO()):
            list(batches(DataLoader(data, 5)))
        assert data.listed == list(range(30))
        assert counts.sum() == 30


@pytest.mark.parametrize("of_library", [False, True])
@ranks(1, 3)
def test_what_loading_keeps_in_containers_every_rank_keeps_in_order(of_library):
    with load_own():
        check_what_is_kept_in_containers(of_library)


def check_what_is_kept_in_containers(of_library):
    kept_by_all.clear()
    with redirect_stderr(io.StringIO()) as said:
        data = (OfLibrary if of_library else Keeping)(19)
        order = [0, 1, 2, 13, 4, 18, 15, 17, 3, 12, 7, 5, 14, 8, 9, 11]
        list(batches(DataLoader(data, 6, sampler=order)))
    found = [15, 3, 7, 11]
    assert data.listed == kept_by_all == [*data.named.values()] == found
    assert [*data.last] == found[-3:]
    assert data.numbers == {*found}
    assert [n for n, times in enumerate(data.times) if times] == sorted(found)
    for counts in (np.zeros(30), np.zeros(3000), torch.zeros(3000)):
        with redirect_stderr(io.StringIO()):
            list(batches(DataLoader(Weighing(30, counts), 5)))
        assert counts.sum() == 30
    line = "each rank loads all of it: loading a sample changes the variable kept_by_all."
    assert (line in said.getvalue()) == (instep.rank == 0 and instep.world_size > 1)


class Caching(Noisy):
    """Keeps each sample, under a name that no other test has: `draws` says whether as it was
    drawn."""

    def __init__(self, n, *, draws):
        super().__init__(n)
        self.kept_by_index, self.draws = {}, draws

    def __getitem__(self, index):
        if index not in self.kept_by_index:
            self._fill(index)
        return self.kept_by_index[index]

    def _fill(self, index):
        self.kept_by_index[index] = torch.tensor(index) + (torch.rand(()) if self.draws else 0)


class CountedCache(Caching):
    """Says how many samples it keeps."""

    def __getitem__(self, index):
        return self.counted.setdefault(index, torch.tensor(index))

    def __init__(self, n):
        super().__init__(n, draws=False)
        self.counted = {}

    def __len__(self):
        return self.n + 0 * len(self.counted)


@ranks(2)
def test_a_cache_by_index_that_only_loading_reads_is_each_ranks_own():
    for data, is_shared in (
        (Caching(16, draws=False), True),
        (Caching(16, draws=True), False),
        (CountedCache(16), False),
    ):
        fresh()
        with redirect_stderr(io.StringIO()) as said:
            first, second = (list(batches(DataLoader(data, 8))) for _ in range(2))
        assert same(first, second)
        line = "each rank loads all of it: loading a sample changes"
        assert (line in said.getvalue()) == (instep.rank == 0 and not is_shared)


def test_a_worker_that_is_spawned_is_not_sent_variables_of_the_script():
    rows = RowDataset(Noisy(3), torch.stack, [("square", {"square": lambda x: x * x})])
    sent = pickle.loads(pickle.dumps(rows))
    assert len(sent.__getitems__(RowRequest(0, 0, [1, 2], is_whole=True)).samples) == 2


class Talking(Noisy):
    """Prints a line about some of its samples, of what they drew."""

    def __init__(self, n, *printed):
        super().__init__(n)
        self.printed = printed

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index in self.printed:
            print(index, f"{sample[1]:.4f}")
        return sample


@ranks(1, 3)
def test_what_loading_prints_rank_0_prints_as_one_process_does():
    for printed in (range(14), (9,), (4, 8, 13)):
        fresh()
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(said := io.StringIO()):
            found = torch.cat(list(batches(DataLoader(Talking(14, *printed), 5))))
        if instep.rank == 0:
            lines = [f"{index} {found[index, 1]:.4f}" for index in printed]
            assert out.getvalue().splitlines() == lines
            many = instep.world_size > 1 and len(printed) > 1
            assert ("loading a sample prints. [INS713]" in said.getvalue()) == many


class OtherOnEachRank(Noisy):
    def __getitem__(self, index):
        return torch.tensor(index + instep.rank / 10)


@ranks(2)
def test_samples_that_depend_on_the_rank_are_exchanged_however_cheap_they_are():
    with redirect_stderr(io.StringIO()):
        found = torch.stack([*batches(DataLoader(OtherOnEachRank(60), 6))])
    assert found.shape == (10, 6)
    first, second = instep.all_gather_object(found)
    assert first.equal(second)


def test_own_rows_pay_when_loading_takes_longer_than_talking():
    assert is_exchange_faster(seconds=0.32, nbytes=20_000_000, count=32, ranks=2)
    assert not is_exchange_faster(seconds=0.001, nbytes=1000, count=32, ranks=2)
    assert not is_exchange_faster(seconds=0.01, nbytes=20_000_000, count=32, ranks=8)
    assert not is_exchange_faster(seconds=0.32, nbytes=1000, count=1, ranks=2)


def next_batches(policy, count):
    return [policy.next_batch()[:2] for _ in range(count)]


def test_a_loader_is_judged_by_its_first_batches_and_tried_again_now_and_then():
    cheap, costly = ExchangePolicy(ranks=2, workers=0), ExchangePolicy(ranks=2, workers=0)
    for policy, seconds in ((cheap, 1e-4), (costly, 0.3)):
        assert next_batches(policy, 3) == [
            (True, True),
            (True, True),
            (True, False),
        ]
        for first_is_slow in (1.0, 0.0, 0.0):
            policy.update(32, seconds + first_is_slow, 1000)
    assert next_batches(cheap, 3) == [(True, True), (False, False), (False, False)]
    assert next_batches(costly, 3) == [(True, True), (True, False), (True, False)]
    cheap.force(exchange=True)
    costly.force(exchange=False)
    assert next_batches(cheap, 2) == [(True, False), (True, True)]
    assert next_batches(costly, 2) == [(False, False), (False, False)]
    alone = ExchangePolicy(ranks=1, workers=0)
    assert next_batches(alone, 4) == [(False, False)] * 4


class Lines(IterableDataset):
    def __iter__(self):
        yield from torch.rand(7)


class Bulk(Noisy):
    def __getitems__(self, indices):
        return [torch.rand(1) + index for index in indices]


@ranks(2)
def test_what_has_no_rows_is_loaded_as_plain_python_does():
    for data, more in (
        (Lines(), {}),
        (Bulk(), {}),
        (Noisy(), {"batch_size": None}),
        (Subset(Bulk(), range(9)), {}),
        (TensorDataset(torch.rand(23)), {"shuffle": True}),
    ):
        results = []
        for way in (iter, batches):
            fresh()
            results.append((list(way(DataLoader(data, **{"batch_size": 5, **more}))), streams()))
        assert same(*results), data


@contextmanager
def load_own():
    """Inside, small samples are loaded as others are."""
    os.environ["INSTEP_LOAD"] = "own"
    try:
        yield
    finally:
        del os.environ["INSTEP_LOAD"]


class Sized(Noisy):
    """Of samples with more bytes than a small one has."""

    def __getitem__(self, index):
        return torch.zeros(5000) + super().__getitem__(index)[1]


class Calling(Noisy):
    """Of samples that call more functions than a small one does."""

    def __getitem__(self, index):
        return sum(len("a") for _ in range(33)) + super().__getitem__(index)


class Reading(Noisy):
    """Of samples from a file."""

    def __getitem__(self, index):
        with open(os.devnull) as file:
            return len(file.read()) + super().__getitem__(index)


class DrawingInOne(Noisy):
    """Draws in one sample of a batch only."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index % 5 == 4 else torch.zeros(5)


class DrawingLate(Noisy):
    """Draws from the second batch on."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index > 5 else torch.zeros(5)


@ranks(1, 2, 3)
def test_small_samples_that_draw_are_those_of_plain_python():
    for kind, is_plain in (
        *((Noisy, True), (DrawingInOne, True), (DrawingLate, True)),
        *((Sized, False), (Calling, False), (Reading, False)),
    ):
        results = []
        for way in (iter, batches):
            fresh()
            loader = DataLoader(kind(), 5)
            results.append(([list(way(loader)) for _ in range(2)], streams()))
        assert same(*results) == is_plain, kind


def test_a_profiler_is_in_use_after_calls_were_counted():
    def note(frame, event, argument):
        pass

    sys.setprofile(note)
    try:
        assert counting_calls(len, "four") == (4, len(["len", "setprofile"]))
        assert sys.getprofile() is note
    finally:
        sys.setprofile(None)
    with cProfile.Profile() as profile:
        counting_calls(len, "four")
        streams()
    assert any("streams" in str(entry.code) for entry in profile.getstats())


@ranks(1, 2, 3)
def test_by_option_small_samples_have_streams_of_their_own():
    results = []
    with load_own():
        for way in (iter, batches):
            fresh()
            results.append(list(way(DataLoader(Noisy(), 5))))
    assert not same(*results)


class DifferingLater(Noisy):
    """Loads other samples on each rank, from the third batch on."""

    def __init__(self, n):
        super().__init__(n)
        self.added = instep.rank

    def __getitem__(self, index):
        return super().__getitem__(index) + self.added * (index >= 10)


@ranks(3)
def test_small_samples_that_depend_on_the_rank_are_exchanged():
    with redirect_stderr(io.StringIO()) as said:
        loaded = list(batches(DataLoader(DifferingLater(50), 5)))
    assert ("its samples depend on the rank" in said.getvalue()) == (instep.rank == 0)
    assert all(same(each, loaded[3:]) for each in instep.all_gather_object(loaded[3:]))
    assert len(loaded) == 10


@ranks(2)
def test_load_whole_keeps_the_numbers_of_plain_python():
    os.environ["INSTEP_LOAD"] = "whole"
    try:
        results = []
        for way in (iter, batches):
            fresh()
            results.append((list(way(DataLoader(Noisy(), 5, shuffle=True))), streams()))
        assert same(*results)
    finally:
        del os.environ["INSTEP_LOAD"]


class Nested(Counting):
    """Loads with a loader of its own."""

    def __getitem__(self, index):
        return torch.cat(list(batches(DataLoader(Counting(index % 3 + 1, float), 2)))).sum()


@ranks(2)
def test_loaders_inside_a_data_set_are_plain():
    plain = [sum(range(index % 3 + 1)) for index in range(7)]
    assert [x for batch in batches(DataLoader(Nested(7), 3)) for x in batch.tolist()] == plain


@ranks(2)
def test_a_thread_of_the_scripts_may_fetch_batches_ahead():
    fresh()
    expected = list(DataLoader(Counting(40), 5, shuffle=True))
    fresh()
    loops = [batches(DataLoader(Counting(40), 5, shuffle=True)) for _ in range(1)]
    fetched = queue.Queue()
    thread = threading.Thread(target=lambda: fetched.put(list(loops[0])))
    thread.start()
    total = sum(instep.all_reduce(torch.ones(1)).item() for _ in range(50))
    thread.join()
    assert total == 50 * instep.world_size
    assert same(fetched.get_nowait(), expected)


@ranks(2)
def test_a_thread_may_go_on_with_workers_that_persist():
    passes = []
    for way in (iter, batches):
        fresh()
        more = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
        loader = DataLoader(Counting(20), 5, shuffle=True, **more)
        found = [list(way(loader))]
        thread = threading.Thread(target=lambda: found.append(list(way(loader))))  # noqa: B023
        thread.start()
        thread.join()
        passes.append([*found, list(way(loader))])
        loader._iterator = None
    assert same(*passes)


@ranks(2)
def test_the_table_puts_it_into_torchs_own_loader():
    data = Counting(24, lambda index: torch.full((1 << 18,), float(index)))
    put_in = PatchHandle([LOADER_PATCH])
    try:
        loaded = [batch[:, 0].tolist() for batch in DataLoader(Subset(data, range(4, 24)), 10)]
    finally:
        put_in.remove()
    assert loaded == [list(range(4, 14)), list(range(14, 24))]
    assert len(data.loaded) == 12, "its own half, and a sample of each batch as a proof"


class Embedded(Counting):
    """Runs a model for every sample, as features are computed."""

    def __init__(self, n):
        super().__init__(n)
        self.model = torch.nn.Linear(4, 2)

    @torch.no_grad()
    def __getitem__(self, index):
        return self.model(torch.full((6, 4), float(index)))


@ranks(3)
def test_a_model_inside_a_data_set_runs_on_the_rank_that_loads_the_sample():
    for more in ({}, FORKED):
        fresh()
        data = Embedded(7)
        expected = list(DataLoader(data, 4))
        put_in = PatchHandle([*SHARDED_CALL_PATCHES, LOADER_PATCH])
        try:
            assert same(list(DataLoader(data, 4, **more)), expected)
        finally:
            put_in.remove()


CACHING_SCRIPT = """
import os
import sys
import torch
from torch.utils.data import DataLoader, Dataset

for workers in (0, 2):
    cache = f"cache{workers}"

    class Cached(Dataset):
        calls = 0

        def __len__(self):
            return 24

        def __getitem__(self, index):
            self.calls += 1
            os.makedirs(cache, exist_ok=True)
            with open(f"{cache}/{index}", "a") as file:
                file.write(".")
            return index

    data = Cached()
    for epoch in range(2):
        for batch in DataLoader(data, 4, shuffle=True, num_workers=workers):
            pass
        print([(name, os.path.getsize(f"{cache}/{name}")) for name in sorted(os.listdir(cache))])
    print(data.calls)
"""


@pytest.mark.launch
@pytest.mark.slow
def test_files_that_loading_writes_are_those_of_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CACHING_SCRIPT)

    def said(size):
        folder = tmp_path / str(size)
        folder.mkdir()
        done = forked_jobs.run("run", "-n", str(size), script, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("loading a sample writes files") == (2 if size > 1 else 0)
        return done.stdout

    assert said(1) == said(2)


LOGGING_SCRIPT = """
import threading
from torch.utils.data import DataLoader, Dataset

begun, written = threading.Semaphore(0), threading.Semaphore(0)

def log():
    while True:
        begun.acquire()
        with open("log.txt", "a") as file:
            file.write(".")
        written.release()

class Loaded(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        begun.release()
        written.acquire()
        return index

threading.Thread(target=log, daemon=True).start()
for batch in DataLoader(Loaded(), 4):
    print(batch)
"""


@pytest.mark.launch
def test_what_a_thread_logs_while_samples_are_loaded_is_not_written_by_loading(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOGGING_SCRIPT)
    done = forked_jobs.run("run", "-n", "2", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "writes files" not in done.stderr


DRAWS_LINE = (
    "instep: Noisy draws random numbers in its samples. They are the same for every N, but not "
    "those of plain Python (--load whole keeps those).\n"
)
NOISY_SCRIPT = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

class Noisy(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index + torch.rand(1) * np.random.rand()

torch.manual_seed(0)
np.random.seed(0)
for workers in (0, 2):
    part = Subset(Noisy(), range(23))
    for batch in DataLoader(part, 5, shuffle=True, num_workers=workers):
        print(batch.squeeze().tolist())
print(torch.rand(1), np.random.rand())
"""


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.slow
def test_a_script_has_the_same_random_samples_on_one_rank_and_on_two(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NOISY_SCRIPT)

    def said(size):
        done = forked_jobs.run("run", "-n", str(size), script)
        assert done.returncode == 0
        assert done.stderr == ("" if size == 1 else DRAWS_LINE)
        return done.stdout

    one, two = said(1), said(2)
    assert len(one.splitlines()) == 11
    assert one == two
