"""Batches that workers make themselves: as in one process, and each loaded on one rank where that
takes time."""

import io
import os
import queue
import signal
import threading
from contextlib import contextmanager, redirect_stderr, suppress
from itertools import islice
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import instep
from instep.process.patching import PatchHandle
from instep.unedited.data.workers import worker_batches, worker_datasets
from instep.unedited.errors import LostWorkerError
from instep.unedited.patch_table import WORKER_PATCHES
from pool import ranks
from test_loading import Counting, batches, fresh, same, streams


@contextmanager
def dividing_from(batch):
    """As if the ranks waited long for each batch, and measured it from this one on."""
    with (
        patch.object(worker_batches, "is_sending_faster", lambda seconds, nbytes: True),
        patch.object(worker_batches, "_FIRST_MEASURED", batch),
    ):
        yield


class Loader(DataLoader):
    """One that may have more workers than this machine has cores."""

    def check_worker_number_rationality(self):
        pass


class Counted:
    """Counts the samples that this rank's workers load."""

    def __init__(self):
        self.loaded = torch.zeros((), dtype=torch.int64).share_memory_()

    def load(self, index):
        self.loaded += 1
        return {"x": torch.rand(3) + index, "name": f"sample {index}"}

    def all_loaded(self):
        return sum(instep.all_gather_object(int(self.loaded)))


class Parts(Counted, IterableDataset):
    """Each worker has a part of its own; the later ones have shorter ones."""

    def __init__(self, length=60, length_of_part=lambda worker: 14 - 5 * worker):
        super().__init__()
        self.length, self.length_of_part = length, length_of_part

    def __iter__(self):
        worker = get_worker_info().id
        for index in range(self.length_of_part(worker)):
            yield self.load(100 * worker + index)

    def __len__(self):
        return self.length


class Bulk(Counted, Dataset):
    """Loads all samples of a batch at once."""

    def __len__(self):
        return 50

    def __getitems__(self, indices):
        return [self.load(index) for index in indices]


class Noised(Counted, Dataset):
    """Has a generator of its own, as each worker then has."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self):
        return 50

    def __getitem__(self, index):
        sample = self.load(index)
        sample["x"] += torch.rand(3, generator=self.generator)
        return sample


def two_passes(loader, way):
    """Two passes, the first of which is broken off and then made whole."""
    fresh()
    begun = list(islice(way(loader), 3))
    return [begun, *(list(way(loader)) for _ in range(2)), streams()]


AT_NIGHT = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [2, pytest.param(1, marks=AT_NIGHT), pytest.param(4, marks=AT_NIGHT)]
)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(Parts, {"batch_size": 3}, marks=AT_NIGHT),
        (Parts, {"batch_size": 4, "drop_last": True, "num_workers": 2}),
        pytest.param(Parts, {"batch_size": None}, marks=AT_NIGHT),
        pytest.param(Parts, {"batch_size": 2, "persistent_workers": True}, marks=AT_NIGHT),
        pytest.param(Bulk, {"batch_size": 4, "shuffle": True}, marks=AT_NIGHT),
        (Noised, {"batch_size": 4, "shuffle": True, "persistent_workers": True}),
        pytest.param(Noised, {"batch_size": None}, marks=AT_NIGHT),
    ],
)
@ranks(2, 3)
def test_workers_divided_between_the_ranks_load_the_batches_of_plain_python(first, make, options):
    options = {"num_workers": 3, **options}
    expected = two_passes(Loader(make(), **options), iter)
    data = make()
    with dividing_from(first):
        found = two_passes(Loader(data, **options), batches)
    assert same(found, expected)
    assert data.all_loaded() > 0


@pytest.mark.slow
@ranks(2, 3)
def test_each_worker_loads_on_one_rank_only():
    data = Parts(length_of_part=lambda worker: 20)
    loader = Loader(data, 2, num_workers=3)
    with dividing_from(1):
        first, second = ([*batches(loader)] for _ in range(2))
    assert len(first) == len(second) == 30
    in_first_batches = instep.world_size * 3 * 2 * 3
    """Before they know that they are divided, workers load what torch has asked them for."""
    assert data.all_loaded() <= 2 * 60 + in_first_batches
    assert int(data.loaded) < 2 * 60


@ranks(2)
def test_other_attributes_are_those_of_torchs_own_iterator():
    for data in Parts(), Bulk(), list(range(8)):
        loader = DataLoader(data, 2, num_workers=2)
        plain, divided = iter(loader), batches(loader)
        own = {*vars(divided)} & {*vars(plain)}
        assert all(type(getattr(divided, name)) is type(getattr(plain, name)) for name in own)


class Prints(Parts):
    def load(self, index):
        print("loads", index)
        return super().load(index)


@pytest.mark.slow
@ranks(2)
def test_workers_that_print_are_not_divided():
    data = Prints(length_of_part=lambda worker: 8)
    with dividing_from(1):
        assert len([*batches(DataLoader(data, 2, num_workers=2))]) == 8
    assert data.all_loaded() == 2 * 16


class PrintsLate(Parts):
    def load(self, index):
        if index == 110:
            print("loads", index)
        return super().load(index)


@pytest.mark.slow
@ranks(2)
def test_a_worker_that_prints_once_it_is_divided_is_reported_and_not_divided_again():
    data = PrintsLate(length_of_part=lambda worker: 14)
    loader = DataLoader(data, 2, num_workers=2)
    said = io.StringIO()
    with dividing_from(1), redirect_stderr(said):
        for _ in range(2):
            assert len([*batches(loader)]) == 14
            before = data.all_loaded()
        [*batches(loader)]
    assert data.all_loaded() - before == 2 * 28
    reported = "a worker on rank 1 prints, which only counts on rank 0" in said.getvalue()
    assert reported == (instep.rank == 0)


class Fails(Parts):
    def load(self, index):
        if index == 104:
            raise KeyError(index)
        return super().load(index)


@pytest.mark.slow
@ranks(2)
def test_an_error_in_a_divided_worker_is_one_of_all_ranks_and_the_loop_may_go_on():
    found = {}
    for way in (iter, batches):
        fresh()
        loop = way(DataLoader(Fails(), 2, num_workers=2))
        found[way] = []
        with dividing_from(1):
            while True:
                try:
                    found[way].append(next(loop))
                except StopIteration:
                    break
                except KeyError as error:
                    found[way].append(str(error).splitlines()[0])
    assert same(found[iter], found[batches])


@pytest.mark.slow
@ranks(2)
def test_a_thread_may_go_on_with_divided_workers():
    fresh()
    expected = list(DataLoader(Parts(), 2, num_workers=2))
    fresh()
    loop, fetched = batches(DataLoader(Parts(), 2, num_workers=2)), queue.Queue()
    with dividing_from(1):
        thread = threading.Thread(target=lambda: fetched.put(list(loop)))
        thread.start()
        thread.join(30)
    assert same(fetched.get_nowait(), expected)


class OfTheProcess(IterableDataset):
    """Data whose order is drawn with a seed that only this process has."""

    def __init__(self, length=23, fails_at=None):
        self.length, self.fails_at = length, fails_at

    def __iter__(self):
        drawn = torch.rand(self.length, generator=torch.Generator().manual_seed(os.getpid()))
        for index, number in enumerate(drawn):
            if index == self.fails_at:
                raise KeyError(f"sample {index}")
            yield {"x": torch.stack([number, number]), "name": f"{number:.3f}"}


def on_all_ranks(value):
    """Whether every rank has this value."""
    return all(same(value, other) for other in instep.all_gather_object(value))


@pytest.mark.slow
@ranks(2)
def test_what_workers_draw_with_a_seed_of_the_process_is_that_of_one_rank_on_all():
    fresh()
    printed = io.StringIO()
    for more in ({"batch_size": 4}, {"batch_size": None}, {"persistent_workers": True}):
        data = OfTheProcess()
        loader = DataLoader(data, **{"batch_size": 4, "num_workers": 2, **more})
        with redirect_stderr(printed):
            passes = [list(batches(loader)) for _ in range(2)]
            passes.insert(1, list(islice(batches(loader), 3)))
        loader._iterator = None
        assert len(passes[0]) == len(passes[2]) == len(list(loader))
        assert on_all_ranks(passes)
        loader._iterator = None
    assert on_all_ranks(streams())
    lines = printed.getvalue().count("that of one rank on all ranks")
    assert lines == (3 if instep.rank == 0 else 0)


@ranks(2)
def test_an_error_of_a_worker_of_rank_0_is_one_on_all_ranks():
    loop = batches(DataLoader(OfTheProcess(9, fails_at=7), 2, num_workers=1))
    found = [next(loop)["name"] for _ in range(3)]
    assert on_all_ranks(found)
    with pytest.raises(KeyError, match="sample 7"):
        next(loop)


@pytest.mark.slow
@ranks(2)
def test_streams_for_which_no_rank_waits_are_loaded_by_each():
    fresh()
    expected = list(DataLoader(Parts(), 3, num_workers=1))
    fresh()
    data = Parts()
    loop = batches(DataLoader(data, 3, num_workers=1))
    assert same(list(loop), expected)
    assert not loop.needs_all_ranks()
    assert data.all_loaded() == 2 * 14


def test_the_time_in_which_a_process_waits_for_a_core_is_what_the_kernel_counts():
    clock = worker_datasets.CoreWait()
    with (
        patch.object(worker_datasets, "perf_counter", iter([10.0, 12.0, 13.0]).__next__),
        patch.object(worker_datasets, "_seconds_without_core", iter([3.0, 3.5, 5.0]).__next__),
    ):
        assert [clock.share() for _ in range(3)] == [0.0, 0.25, 1.0]
    if os.path.exists("/proc/self/schedstat"):
        assert worker_datasets._seconds_without_core() > 0


@pytest.mark.slow
@ranks(2)
def test_passes_over_the_same_data_may_overlap():
    found = {}
    for way in (iter, batches):
        fresh()
        loader = DataLoader(Parts(), 2, num_workers=2)
        with dividing_from(2):
            early = way(loader)
            found[way] = [next(early)]
            late = way(loader)
            found[way] += [next(late), next(late), *early, *late]
            assert next(early, None) is next(late, None) is None
    assert same(found[iter], found[batches])


def kill_a_worker_of_rank_1(loop):
    """It ends while the main thread does something else."""
    if instep.rank == 1:
        worker = loop._workers[1]
        os.kill(worker.pid, signal.SIGKILL)
        while worker.is_alive():
            pass


def catch_all(loop):
    """A script that goes on after each error."""
    for _ in range(9):
        with suppress(Exception):
            next(loop)


@ranks(2)
def test_a_worker_that_is_killed_is_an_error_at_the_same_batch_on_all_ranks():
    with PatchHandle(WORKER_PATCHES):
        loop = batches(DataLoader(Counting(40), 2, num_workers=2))
        found = [next(loop)]
        kill_a_worker_of_rank_1(loop)
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
            found.extend(loop)
        assert on_all_ranks(found)
        assert len(list(batches(DataLoader(Counting(6), 2, num_workers=1)))) == 3


@ranks(2)
def test_a_worker_that_is_killed_where_each_rank_loads_for_itself_ends_its_rank():
    data = Parts()
    with PatchHandle(WORKER_PATCHES):
        loop = batches(DataLoader(data, 2, num_workers=2))
        for _ in range(4):
            next(loop)
        kill_a_worker_of_rank_1(loop)
        if instep.rank == 0:
            next(loop)
            return
        with pytest.raises(LostWorkerError, match=r"of rank 1 was killed by SIGKILL\. The other"):
            catch_all(loop)
