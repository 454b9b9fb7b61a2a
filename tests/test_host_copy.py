"""Parameters and states of optimizers of which the ranks of a host keep one copy."""

from __future__ import annotations

import copy
import gc
import io
import os
import resource
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef

import instep
from instep.distributed import one_copy
from instep.distributed.communication import rank_local
from instep.distributed.communication.transport import get_transport
from instep.distributed.errors import PeerDiedError, SharedMemoryError
from instep.distributed.one_copy import MOST_WRITES
from instep.distributed.shm import memory_handover
from instep.distributed.shm.memory import host_memory
from instep.distributed.shm.memory.host_memory import HUGE_PAGE, HostMemory, numa_nodes
from instep.distributed.shm.memory.mapping import PAGE, open_memory
from instep.process.patching import PatchHandle
from instep.training.errors import DriftError
from instep.training.optimizer_shards.host_copy import HostCopy
from instep.unedited.optimizer_steps import divided_steps
from instep.unedited.patch_table import OPTIMIZER_PATCHES
from kept_by_child import kept_by_child
from launching import Launch
from pool import ranks, run, talking_over

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs Linux on x86-64"
)
STEPS = 8
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "momentum, foreach": lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: optim.Adam(p, 1e-2),
    "AdamW": lambda p: optim.AdamW(p, 1e-2, amsgrad=True),
    "Adam, loops": lambda p: optim.Adam(p, 1e-2, foreach=False),
    "Adam, fused": lambda p: optim.Adam(p, 1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3, weight_decay=0.1),
    "RMSprop, centered": lambda p: optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
}


# ------------------------------------------------------------------------------------ the memory


def memory_of(pages: int) -> HostMemory:
    return HostMemory(open_memory(pages * PAGE))


def test_what_a_process_writes_to_its_private_pages_is_seen_by_no_other() -> None:
    memory, like = memory_of(3), torch.empty(100)
    shared, private = memory.shared(like, PAGE), memory.private(like, PAGE)
    shared.fill_(1)
    assert private.tolist() == [1] * 100
    assert not memory.has_private_pages()
    private[7] = 5
    assert memory.has_private_pages()
    assert shared.tolist() == [1] * 100
    shared[8] = 2
    assert private[8] == 1  # the page is a copy
    memory.drop_private_pages()
    assert private[6:9].tolist() == [1, 1, 2]
    assert not memory.has_private_pages()


def test_private_memory_keeps_its_values_when_it_is_left() -> None:
    memory, like = memory_of(2), torch.empty(64)
    shared, private = memory.shared(like, 0), memory.private(like, 0)
    shared.fill_(3)
    memory.leave()
    shared.fill_(4)
    assert private.tolist() == [3] * 64


def test_private_memory_stays_where_it_is_while_new_memory_is_written() -> None:
    memory, like = memory_of(1), torch.empty(64)
    shared, private = memory.shared(like, 0), memory.private(like, 0)
    shared.fill_(1)
    memory.write_to(open_memory(PAGE))
    shared.fill_(2)
    assert private.tolist() == [1] * 64
    memory.drop_private_pages()
    assert private.tolist() == [2] * 64


def test_tensors_keep_their_memory_and_nothing_else_does() -> None:
    before = mapped_files()
    memory, like = memory_of(2), torch.empty(4, 6).t()
    private = memory.private(like, 0)
    assert private.stride() == like.stride()
    assert private.untyped_storage().nbytes() == like.nbytes
    del memory
    gc.collect()
    private.fill_(1)
    assert mapped_files() == before + 1
    del private
    gc.collect()
    assert mapped_files() == before


def mapped_files() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:instep" in line for line in maps)


def test_a_kernel_that_tells_nothing_of_pages_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("instep.distributed.shm.memory.host_memory._PAGEMAP", Path(os.devnull))
    with pytest.raises(OSError, match="told 0 of 8 bytes"):
        memory_of(1)


def test_cpus_are_on_numa_nodes(tmp_path, monkeypatch) -> None:
    for node, cpus in enumerate(("0-3,8-11", "4-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(host_memory, "_NODES", tmp_path)
    assert numa_nodes({8, 3}) == {0}
    assert numa_nodes({5}) == {1}
    assert numa_nodes({0, 5}) == {0, 1}
    monkeypatch.setattr(host_memory, "_NODES", tmp_path / "none")
    assert numa_nodes({5}) == {0}


@ranks(1, 3)
def test_all_ranks_open_the_same_memory() -> None:
    descriptor = get_transport().open_memory(5000)
    if get_transport().size == 1:
        assert descriptor is None
        return
    found = os.fstat(descriptor)
    assert (found.st_size, os.get_inheritable(descriptor)) == (HUGE_PAGE, False)
    assert len(set(instep.all_gather_object((found.st_dev, found.st_ino)))) == 1
    os.close(descriptor)


@ranks(2)
def test_memory_that_is_not_to_be_had_is_an_error_on_all_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_handover, "open_host_memory", _refuse)
        with pytest.raises(SharedMemoryError, match="sent none" if instep.rank else "is full"):
            get_transport().open_memory(PAGE)
    with pytest.MonkeyPatch.context() as patch:
        if instep.rank == 1:
            patch.setattr(memory_handover, "CREDENTIALS", _OfAnother)
        with pytest.raises(SharedMemoryError, match="another process" if instep.rank else "could"):
            get_transport().open_memory(PAGE)
    os.close(get_transport().open_memory(PAGE))  # the group goes on


@ranks(2)
def test_memory_that_a_rank_may_open_no_file_for_is_an_error_on_all_ranks() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as at_the_end:
        if instep.rank == 1:  # one file more: the socket by which the memory comes
            highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
            while (last := os.dup(0)) <= highest:
                at_the_end.callback(os.close, last)
            os.close(last)
            at_the_end.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, limits[1]))
        with pytest.raises(SharedMemoryError, match="not arrive" if instep.rank else "could"):
            get_transport().open_memory(PAGE)
    os.close(get_transport().open_memory(PAGE))  # the group goes on


def test_memory_is_given_back_where_a_rank_dies_before_it_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(_: object) -> None:
        raise PeerDiedError("rank 1", "open_memory")

    made: list[int] = []
    monkeypatch.setattr(
        memory_handover, "open_host_memory", lambda _: made.append(os.dup(0)) or made[0]
    )
    exchange: Any = SimpleNamespace(rank=0, size=2, broadcast=lambda *_: None, barrier=die)
    with pytest.raises(PeerDiedError):
        memory_handover.open_on_all_ranks(exchange, PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def _refuse(_: int) -> int:
    raise OSError("the machine is full")


class _OfAnother:
    size = memory_handover.CREDENTIALS.size

    @staticmethod
    def unpack(_: bytes) -> tuple[int, int, int]:
        return 1, os.getuid(), os.getgid()


def test_over_gloo_there_is_no_common_memory() -> None:
    with talking_over("gloo"):
        assert run(2, opened_memory) == [None, None]


def opened_memory() -> int | None:
    return get_transport().open_memory(PAGE)


# ------------------------------------------------------------------- steps of unedited scripts


@contextmanager
def small_copies() -> Iterator[None]:
    """Inside, small models have a common copy, too, in steps of unedited scripts."""
    with pytest.MonkeyPatch.context() as patch, PatchHandle(OPTIMIZER_PATCHES):
        patch.setattr(one_copy, "FEWEST_ELEMENTS", 100)
        yield


class Training:
    """A model whose gradients are drawn, the same on all ranks; whole: without a common copy."""

    def __init__(self, make, whole: bool = False, setting: str = "auto") -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Conv2d(3, 17, 3), nn.Linear(33, 65), nn.LSTM(9, 31))
        self.model[0].to(memory_format=torch.channels_last)
        self.optimizer = make(list(self.model.parameters()))
        self.generator = torch.Generator().manual_seed(4)
        self.setting = "off" if whole else setting
        self.change = lambda gradient: gradient

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def copy(self) -> HostCopy | None:
        known = divided_steps._steps_of.get(self.parameters[0])
        return None if known is None or not known.copy.slices else known.copy

    def step(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INSTEP_HOST_COPY", self.setting)
            for parameter in self.parameters:
                drawn = torch.randn(parameter.shape, generator=self.generator)
                parameter.grad = self.change(torch.empty_like(parameter).copy_(drawn))
            self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def values(self) -> list[torch.Tensor]:
        states = [
            value
            for parameter in self.parameters
            for value in self.optimizer.state[parameter].values()
            if value is not None
        ]
        return [*self.parameters, *states]


def assert_same(one: Training, other: Training) -> None:
    for mine, theirs in zip(one.values(), other.values(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


def train_both(make, between=lambda training, step: None, steps=STEPS) -> Training:
    """The same training with a common copy and without; returns the former."""
    common, whole = Training(make), Training(make, whole=True)
    for step in range(steps):
        for training in (common, whole):
            training.step()
            between(training, step)
        assert_same(common, whole)
    assert whole.copy is None
    return common


@ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_the_bits_of_the_whole_one(name) -> None:
    with small_copies():
        training = train_both(OPTIMIZERS[name])
        assert training.copy is not None
        own = sum(part.numel() for part in training.copy.slices[0])
        assert own < sum(p.numel() for p in training.parameters) / get_transport().size + 64
        counts = name != "Adam, fused"  # PyTorch's kernel does not
        assert all((p._version >= STEPS) == counts for p in training.parameters)


CHANGES: dict[str, Callable[[Training], object]] = {
    "a weight": lambda t: t.parameters[0].data.mul_(1.5),
    "a weight, known to autograd": lambda t: nn.init.constant_(t.parameters[2], 0.25),
    "a state": lambda t: t.optimizer.state[t.parameters[0]]["exp_avg"].data.zero_(),
    "a step counter": lambda t: t.optimizer.state[t.parameters[0]]["step"].add_(3),
    "all weights": lambda t: t.model.load_state_dict(
        {k: v + 1 for k, v in t.model.state_dict().items()}
    ),
    "other memory": lambda t: setattr(t.parameters[1], "data", t.parameters[1].data * 2),
    "another optimizer's state": lambda t: t.optimizer.load_state_dict(
        copy.deepcopy(t.optimizer.state_dict())
    ),
    "memory shared with children": lambda t: t.model.share_memory(),
}
LOSES_THE_COPY = "memory shared with children"


@ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_script_changes_is_changed_once(name) -> None:
    with small_copies():
        training = train_both(
            OPTIMIZERS["Adam"], lambda training, step: step == 3 and CHANGES[name](training)
        )
        assert (training.copy is not None) == (name != LOSES_THE_COPY)


@ranks(2)
def test_a_script_that_writes_in_every_step_gets_memory_of_its_own() -> None:
    found = []

    def clamp(training: Training, step: int) -> None:
        training.parameters[0].data.clamp_(-0.3, 0.3)
        found.append(training.copy is not None)

    with small_copies():
        train_both(OPTIMIZERS["SGD"], clamp, steps=9)
    of_common = found[::2]
    assert of_common.count(True) == MOST_WRITES + 1
    assert not of_common[-1]


@ranks(2)
def test_what_only_one_rank_writes_stays_there() -> None:
    """So that the comparison of the ranks' parameters finds it."""
    with small_copies():
        training = Training(OPTIMIZERS["momentum"])
        for _ in range(4):
            training.step()
        assert training.copy is not None
        if instep.rank == 1:
            training.parameters[0].data[0] = 7
        assert training.parameters[0][0].eq(7).all() == (instep.rank == 1)
        training.step()
        assert training.copy is None
        sums = instep.all_gather_object(training.parameters[0].sum().item())
        assert sums[0] != sums[1]
        sums = instep.all_gather_object(training.parameters[1].sum().item())
        assert sums[0] == sums[1]


@ranks(2)
def test_parameters_that_differ_have_no_common_copy() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        training.parameters[0].data.add_(instep.rank)
        for _ in range(STEPS):
            training.step()
        assert training.copy is None


@ranks(2)
def test_memory_that_others_have_stays_where_it_is() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["momentum"])
        alias = training.parameters[0].data if instep.rank == 0 else None
        array = training.parameters[1].detach().numpy()
        for _ in range(5):
            training.step()
        assert training.copy is None
        assert alias is None or torch.equal(alias, training.parameters[0])
        assert torch.equal(torch.from_numpy(array), training.parameters[1])


@ranks(2)
@pytest.mark.parametrize(("setting", "has_copy"), [("auto", False), ("on", True)])
def test_ranks_on_several_numa_nodes_have_copies_of_their_own(setting, has_copy) -> None:
    with small_copies(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_copy, "numa_nodes", lambda _: {instep.rank})
        training = Training(OPTIMIZERS["SGD"], setting=setting)
        for _ in range(4):
            training.step()
        assert (training.copy is not None) == has_copy


@ranks(2)
def test_memory_of_numpy_stays_where_it_is() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        array = np.ones((65, 33), dtype=np.float32)
        training.parameters[2].data = torch.from_numpy(array)
        for _ in range(5):
            training.step()
        assert training.copy is None
        assert torch.equal(torch.from_numpy(array), training.parameters[2])
        assert not (array == 1).any()


@ranks(2)
def test_memory_that_a_script_shares_itself_stays_where_it_is() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        training.model.share_memory()
        before = [parameter.data_ptr() for parameter in training.parameters]
        for _ in range(5):
            training.step()
        assert [parameter.data_ptr() for parameter in training.parameters] == before


def with_gaps(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value], dim=-1)[..., : value.shape[-1]]


def in_inference(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return value.clone()


@ranks(2)
@pytest.mark.parametrize("odd", [with_gaps, in_inference])
def test_odd_parameters_have_no_common_copy(odd) -> None:
    with small_copies():
        common, whole = (Training(OPTIMIZERS["SGD"], whole) for whole in (False, True))
        for training in (common, whole):
            training.parameters[2].data = odd(training.parameters[2].data)
        for _ in range(5):
            common.step()
            whole.step()
            assert_same(common, whole)
        assert common.copy is None


@ranks(2)
def test_another_optimizer_of_the_same_model_has_a_copy_of_its_own() -> None:
    with small_copies():
        common, whole = (Training(OPTIMIZERS["Adam"], whole) for whole in (False, True))
        for make in ("Adam", "momentum", "momentum"):
            for training in (common, whole):
                training.optimizer = OPTIMIZERS[make](training.parameters)
                for _ in range(8):
                    training.step()
            assert common.copy is not None
            assert_same(common, whole)


@ranks(2)
def test_what_has_the_memory_only_for_a_while_delays_the_copy() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        alias = training.parameters[0].data
        for _ in range(3):
            training.step()
        assert training.copy is None
        del alias
        for _ in range(3):
            training.step()
        assert training.copy is not None


@ranks(2)
def test_a_storage_that_the_script_has_stays_where_it_is() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        storage = training.parameters[0].untyped_storage()
        for _ in range(5):
            training.step()
        assert training.copy is None
        assert storage.data_ptr() == training.parameters[0].data_ptr()


@ranks(2)
def test_ranks_whose_tensors_have_other_identities_decide_alike() -> None:
    """An optimizer that is made anew may get the ids of the last one on some ranks only."""
    with small_copies():
        common, whole = (Training(OPTIMIZERS["momentum"], whole) for whole in (False, True))
        kept = []
        for _ in range(9):
            for training in (common, whole):
                if instep.rank == 1:
                    kept.append(training.optimizer)
                training.optimizer = OPTIMIZERS["momentum"](training.parameters)
                for _ in range(2):
                    training.step()
            assert_same(common, whole)


@ranks(2)
def test_steps_in_a_side_thread_are_whole() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["momentum"])
        thread = threading.Thread(target=lambda: [training.step() for _ in range(9)])
        thread.start()
        thread.join()
        assert training.copy is None


class Reader(threading.Thread):
    """Is in a function of its own, in which it might read a tensor, until `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.ends = threading.Lock(), threading.Lock()
        self.ends.acquire()
        self.reads.acquire()
        self.start()
        self.reads.acquire()

    def run(self) -> None:
        self.reads.release()
        self.ends.acquire()

    def end(self) -> None:
        self.ends.release()
        self.join()


@ranks(2)
def test_the_thread_of_asynchronous_collectives_reads_nothing_between_them() -> None:
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        before = [StorageWeakRef(p.untyped_storage()) for p in training.parameters]
        for _ in range(5):
            training.step()
        assert training.copy is not None
        assert all(storage.expired() for storage in before)


@ranks(2)
def test_memory_that_another_thread_may_read_stays_as_long_as_it_does() -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        before = [(StorageWeakRef(p.untyped_storage()), p.shape) for p in training.parameters]
        reader = Reader()
        for _ in range(5):
            training.step()
        assert training.copy is not None
        assert not any(storage.expired() for storage, _ in before)
        reader.end()
        training.step()
        assert all(storage.expired() for storage, _ in before)


@ranks(2)
@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam"])
def test_a_parameter_that_is_in_a_group_twice_is_stepped_twice(name) -> None:
    def make(parameters: list[nn.Parameter]) -> optim.Optimizer:
        with pytest.warns(UserWarning, match="duplicate"):
            return OPTIMIZERS[name]([*parameters, parameters[0]])

    with small_copies():
        assert train_both(make).copy is None
    with PatchHandle(OPTIMIZER_PATCHES):
        ours = Training(make)
        for _ in range(STEPS):
            ours.step()
    theirs = Training(make)
    for _ in range(STEPS):
        theirs.step()
    assert_same(ours, theirs)


@ranks(2)
def test_a_parameter_without_elements_is_no_obstacle() -> None:
    with small_copies():
        common, whole = (Training(OPTIMIZERS["Adam"], whole) for whole in (False, True))
        for training in (common, whole):
            training.model.append(nn.ParameterList([torch.empty(0, 3)]))
            training.optimizer = OPTIMIZERS["Adam"](training.parameters)
            for _ in range(STEPS):
                training.step()
        assert common.copy is not None
        assert_same(common, whole)


@ranks(2)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_parameter_may_lose_rows(name) -> None:
    def prune(training: Training, step: int) -> None:
        if step == 4:
            parameter = training.parameters[2]
            parameter.data, parameter.grad = parameter.data[:40], None
            state = training.optimizer.state[parameter]
            for key in state.keys() - {"step"}:
                if state[key] is not None:
                    state[key] = state[key][:40]

    with small_copies():
        train_both(OPTIMIZERS[name], prune)


@ranks(2)
@pytest.mark.parametrize("what", ["a gradient", "the learning rate", "rounding"])
def test_gradients_that_become_different_are_an_error(what) -> None:
    with small_copies():
        training = Training(OPTIMIZERS["SGD"])
        for _ in range(4):
            training.step()
        assert training.copy is not None
        if what == "the learning rate":
            training.optimizer.param_groups[0]["lr"] *= 1 + instep.rank
        if what == "a gradient":
            training.change = lambda grad: grad.add_(instep.rank)
        if what == "rounding":
            training.change = lambda grad: grad.mul_(1 + instep.rank * 2**-23)
            training.steps(8)
            return
        shown = {
            "a gradient": "the gradient of a parameter of shape .17, 3, 3, 3. of rank 1 differs"
        }
        with pytest.raises(DriftError, match=shown.get(what, "lr of an optimizer is not the same")):
            training.steps(8)


@ranks(2)
@pytest.mark.parametrize("writes", [False, True])
def test_a_child_keeps_the_values_of_its_fork(writes) -> None:
    with small_copies():
        training = Training(OPTIMIZERS["Adam"])
        for _ in range(4):
            training.step()
        first = training.parameters[0].detach().clone()
        with kept_by_child(training.values, rank=1):
            if writes:
                training.parameters[0].data.add_(1)
            for _ in range(3):
                training.step()
            assert training.copy is not None
            assert not torch.equal(first, training.parameters[0])


@ranks(2)
def test_a_child_makes_steps_of_its_own() -> None:
    with small_copies(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_local._process_of_rank, "value", os.getpid())  # as in an unedited script
        common, whole = (Training(OPTIMIZERS["momentum"], whole) for whole in (False, True))
        for training in (common, whole):
            for _ in range(4):
                training.step()
        assert common.copy is not None
        done, done_writes = os.pipe()
        child = os.fork() if instep.rank == 0 else None
        if child == 0:
            before = common.parameters[0].clone()
            common.step()
            os.write(done_writes, b"n" if torch.equal(before, common.parameters[0]) else b"y")
            os._exit(0)
        if child is not None:
            assert os.read(done, 1) == b"y"
            os.waitpid(child, 0)
        os.close(done)
        os.close(done_writes)
        assert_same(common, whole)


@ranks(2)
def test_a_gradient_that_is_missing_in_some_steps_changes_nothing() -> None:
    with small_copies():
        common, whole = (Training(OPTIMIZERS["Adam"], whole) for whole in (False, True))
        for step in range(8):
            for training in (common, whole):
                training.parameters[-1].requires_grad_(step % 2 == 0)
                group = training.optimizer.param_groups[0]
                group["params"] = training.parameters[: -1 if step % 2 else None]
                training.step()
                group["params"] = training.parameters
            assert_same(common, whole)


@ranks(2)
def test_a_model_that_is_gone_leaves_no_memory() -> None:
    with small_copies():
        before = mapped_files()
        for _ in range(2):
            training = Training(OPTIMIZERS["Adam"])
            for _ in range(4):
                training.step()
            assert training.copy is not None
            assert mapped_files() > before
            del training
            gc.collect()
            assert mapped_files() == before


@ranks(2)
def test_what_is_saved_is_as_large_as_ever() -> None:
    with small_copies():
        common, whole = (Training(OPTIMIZERS["Adam"], whole) for whole in (False, True))
        sizes = []
        for training in (common, whole):
            for _ in range(4):
                training.step()
            file = io.BytesIO()
            torch.save([training.model.state_dict(), training.optimizer.state_dict()], file)
            sizes.append(len(file.getvalue()))
        assert common.copy is not None
        assert sizes[0] == sizes[1]


# --------------------------------------------------------------------- instep.shard(optimizer)

SHARDED: dict[str, Callable[..., optim.Optimizer]] = {
    **{name: OPTIMIZERS[name] for name in ("SGD", "momentum", "Adam, loops", "Adam, fused")},
    "NAdam": lambda p: optim.NAdam(p, 1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-2),
}


def sharded_both(make, between=lambda model, optimizer, step: None) -> list[nn.Module]:
    """The same replica with a divided optimizer, with a common copy and without."""
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(2)
        models.append(instep.replicate(nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 65))))
        optimizers.append(instep.shard(make(list(models[-1].parameters()))))
    inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        for setting, model, optimizer in zip(("auto", "off"), models, optimizers, strict=True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(one_copy, "FEWEST_ELEMENTS", 100)
                patch.setenv("INSTEP_HOST_COPY", setting)
                optimizer.zero_grad()
                model(instep.shard(inputs)).square().mean().backward()
                optimizer.step()
                between(model, optimizer, step)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one, other)
    one, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert one.keys() == other.keys()
    for number, entries in one.items():
        for name, value in entries.items():
            assert value is other[number][name] or torch.equal(value, other[number][name])
    return models


def is_common(model: nn.Module) -> bool:
    addresses = {p.data_ptr() for p in model.parameters()}
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:instep" in line]
    return all(any(int(a, 16) <= address < int(b, 16) for a, b in ranges) for address in addresses)


@ranks(2, 3)
@pytest.mark.parametrize("name", SHARDED)
def test_a_divided_optimizer_has_the_same_bits_with_a_common_copy(name) -> None:
    models = sharded_both(SHARDED[name])
    assert [is_common(model) for model in models] == [True, False]


CHANGES_OF_A_REPLICA: dict[str, Callable[[nn.Module], object]] = {
    "written": lambda model: model[0].weight.data.mul_(1.5),
    "other memory": lambda model: setattr(model[0].weight, "data", model[0].weight.data * 2),
    "loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
}


@ranks(2)
@pytest.mark.parametrize("name", CHANGES_OF_A_REPLICA)
def test_what_a_script_changes_beside_a_divided_optimizer(name) -> None:
    change = CHANGES_OF_A_REPLICA[name]
    models = sharded_both(
        SHARDED["Adam, fused"], lambda model, optimizer, step: step == 2 and change(model)
    )
    assert is_common(models[0])


# ------------------------------------------------------------------------- under `instep run`

SCRIPT = """
    import os
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 800), nn.ReLU(), nn.Linear(800, 700)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(24, 700).double()
    for step in range(8):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        if step == 5:
            with torch.no_grad():
                model[2].weight.clamp_(-0.03, 0.03)
    address = model[0].weight.data_ptr()
    for line in open("/proc/self/maps"):
        begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if begin <= address < end:
            print("one copy" if "memfd:instep" in line else "a copy of its own")
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    moments = torch.cat([s["exp_avg_sq"].flatten() for s in optimizer.state.values()])
    print(values.abs().sum().item(), moments.sum().sqrt().item())
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, ("run",))
    yield launch
    launch.close()


@pytest.mark.launch
@pytest.mark.slow
def test_an_unedited_training_has_one_copy_and_the_numbers_of_one_process(tmp_path, launch) -> None:
    """Also where the ranks may open no files for writing (Landlock)."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    printed = []
    for count in (1, 2):
        done = launch.run_forked("-n", count, "train.py")
        assert done.returncode == 0, done.stderr
        where, numbers = done.stdout.splitlines()
        assert where == ("one copy" if count > 1 else "a copy of its own")
        printed.append([float(number) for number in numbers.split()])
    assert printed[1] == pytest.approx(printed[0], rel=1e-9)
