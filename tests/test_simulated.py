"""Trainings on a simulated accelerator (simulated.py): the numbers, and what the host waits for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import components
import instep
import pool
import test_exactness
import test_sharded_trainings
import test_training
from instep.process.patching import PatchHandle
from instep.unedited.patch_table import SHARDED_CALL_PATCHES
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan import control_flow
from oracle import Log, same_as_one_process
from sharded_training import SHARDED, unedited

pytestmark = [pytest.mark.slow, components.needs("C++")]
SRC = str(Path(instep.__file__).parent)
o = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: o.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: o.Adam(p, 1e-2),
    "AdamW, one by one": lambda p: o.AdamW(p, 1e-2, foreach=False),
    "RMSprop": o.RMSprop,
    "Adagrad": o.Adagrad,
    "Adadelta": o.Adadelta,
    "NAdam": o.NAdam,
    "RAdam": o.RAdam,
    "Adamax": o.Adamax,
    "Rprop": o.Rprop,
    "ASGD": o.ASGD,
    "Adafactor": o.Adafactor,
    "divided": lambda p: instep.shard(o.AdamW(p, 1e-2)),
    # with the options that torch has for CUDA
    "SGD, fused": lambda p: o.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam, fused": lambda p: o.Adam(p, 1e-2, fused=True),
    "AdamW, fused": lambda p: o.AdamW(p, 1e-2, fused=True, amsgrad=True),
    "Adam, capturable": lambda p: o.Adam(p, 1e-2, capturable=True),
    "Adam, one by one, capturable": lambda p: o.Adam(p, capturable=True, foreach=False),
    "RMSprop, capturable": lambda p: o.RMSprop(p, capturable=True),
    "Adadelta, capturable": lambda p: o.Adadelta(p, capturable=True),
    "NAdam, capturable": lambda p: o.NAdam(p, capturable=True),
    "RAdam, capturable": lambda p: o.RAdam(p, capturable=True),
    "Adamax, capturable": lambda p: o.Adamax(p, capturable=True),
    "Rprop, capturable": lambda p: o.Rprop(p, capturable=True),
    "ASGD, capturable": lambda p: o.ASGD(p, capturable=True),
}


@pytest.fixture(autouse=True)
def _on_sim() -> Iterator[None]:
    with pool.talking_over("sim"):
        yield


# ---------------------------------------------------------------------------- the device itself


def copies_by_pinned_memory() -> None:
    import simulated

    source, back = torch.ones(2).pin_memory(), torch.zeros(2).pin_memory()
    x = torch.empty(2, device="sim")
    with simulated.counted() as host:
        x.copy_(source, non_blocking=True)
        source.fill_(5)  # too early
        y = x * 2
        back.copy_(y, non_blocking=True)
        assert back.isnan().all()
        torch.get_device_module("sim").synchronize()
    assert back.tolist() == [10.0, 10.0]
    assert (host.reads, host.uploads) == ([], [])


def what_the_host_waits_for() -> None:
    import simulated

    with simulated.counted() as host:
        x = torch.ones(3).to("sim")
        x[x > 0].sum().item()
    assert [line.split(": ")[1] for line in host.uploads] == ["copy from the CPU"]
    assert all(f"{__file__}:" in line for line in host.reads + host.uploads)
    assert host.reads[0].endswith(("aten.nonzero.default", "aten.index.Tensor"))
    assert host.reads[-1].endswith("aten._local_scalar_dense.default")


def what_does_not_mix() -> None:
    x = torch.ones(3, device="sim")
    with pytest.raises(RuntimeError, match="at least two devices, sim:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device="sim", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="one allreduce"):
        torch.distributed.distributed_c10d._get_default_group().allreduce([x, torch.ones(3)])


def what_every_device_has() -> None:
    """Views share memory, copies and checkpoints do not; generators, autocast and scalers work."""
    import copy
    import io

    x = torch.arange(6.0).view(2, 3).to("sim")
    x.t()[1:].mul_(2)
    assert x.tolist() == [[0, 2, 4], [3, 8, 10]]
    twin, file = copy.deepcopy(x), io.BytesIO()
    torch.save(x[1:], file)
    twin.zero_()
    file.seek(0)
    assert torch.load(file).device == x.device
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == [[3, 8, 10]]
    torch.manual_seed(3)
    drawn = torch.randn(4, device="sim")
    again = torch.randn(4, device="sim", generator=torch.Generator("sim").manual_seed(3))
    assert torch.equal(drawn, again)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert F.linear(x, x).dtype is torch.bfloat16
        assert F.mse_loss(x.bfloat16(), x.bfloat16()).dtype is torch.float32
    lstm = nn.LSTM(3, 2, 2)
    (out, _), (expected, _) = copy.deepcopy(lstm).to("sim")(x), lstm(x.cpu())
    assert torch.allclose(out.cpu(), expected)


@pytest.mark.parametrize(
    "body",
    [
        copies_by_pinned_memory, what_the_host_waits_for, what_does_not_mix, what_every_device_has,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_the_device(body: Callable[[], None]) -> None:
    pool.run(2, body)


# ------------------------------------------------------------------------------- the numbers


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, device=x.device, dtype=x.dtype)


def dropped(log: Log) -> None:
    model = nn.Sequential(Noisy(), *test_exactness.net(drop=0.3))
    data = test_exactness.rows(31)
    test_exactness.train(log, model, data, lambda m, x, y: F.cross_entropy(m(x), y))


def test_batch_statistics_and_dropout_of_replicas_are_those_of_one_process() -> None:
    same_as_one_process(dropped, sizes=(2, 3), dtype=torch.float64, nudge=True)


@pytest.mark.nightly
def test_a_convolutional_network_has_the_numbers_of_one_process() -> None:
    same_as_one_process(test_training.classify, 43, 10, sizes=(2, 3))


EXPLICIT = {
    "class_weighted": (), "ignoring": (), "summed": (), "tiny": (0.5,),
    "exploding": (), "augmented": (0,), "checkpointed": (False,), "attending": (),
    "time_first": (), "sparse": (), "clipping": (), "compiled": ("aot_eager",),
}  # fmt: skip
"""Trainings of test_exactness.py, with what else they take."""


def nightly_but(names: set[str], *others: Any) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in names else pytest.mark.nightly) for name in others
    ]


@pytest.mark.parametrize("name", nightly_but({"sparse", "class_weighted", "clipping"}, *EXPLICIT))
def test_replicas_have_the_numbers_of_one_process(name: str) -> None:
    """`attending`: dropout in a layer, in attention and between recurrent layers, and noise."""
    check_replicas(name)


def check_replicas(name: str) -> None:
    """That a training of EXPLICIT has the numbers of one process."""
    training = getattr(test_exactness, name)
    same_as_one_process(
        training, *EXPLICIT[name], sizes=(3,), dtype=torch.float64, nudge=name in NUDGED
    )


def large(log: Log) -> None:
    """Buckets of 1 MiB: some hold several parameters, others one that is larger than a bucket."""
    os.environ["INSTEP_BUCKET_MIB"] = "1"
    try:
        layers = nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 700), nn.Tanh(), nn.Linear(700, 4)
        model = nn.Sequential(*layers).double()
        data = test_exactness.rows(14)
        test_exactness.train(log, model, data, lambda m, x, y: F.cross_entropy(m(x), y), epochs=1)
    finally:
        del os.environ["INSTEP_BUCKET_MIB"]


def test_large_buckets_have_the_numbers_of_one_process() -> None:
    same_as_one_process(large, sizes=(3,), dtype=torch.float64)


NUDGED = {"tiny", "checkpointed", "attending", "time_first", "compiled"}
OF_THE_CPU = {"draws_of_every_kind", "dropout_inside_of_a_recurrent_layer"}
"""Trainings with tensors of their own on the CPU, or with kernels that the device does not have
(GRU)."""

BY_DAY = {"classifier", "sparse_embedding"}


def on_sim(log: Log, name: str) -> None:
    import simulated

    before = simulated.operations()
    with torch.device(pool.device()):  # where models and tensors are made
        unedited(log, getattr(test_sharded_trainings, name), is_sharded=True)
    assert simulated.operations() > before


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(
            pytest.param(name, 2, marks=() if name in BY_DAY else pytest.mark.nightly)
            for name in (training.__name__ for training in SHARDED)
            if name not in OF_THE_CPU
        ),
        pytest.param("classifier", 3, marks=pytest.mark.nightly),
    ],
)
def test_unedited_trainings_have_the_numbers_of_one_process(name: str, size: int) -> None:
    same_as_one_process(on_sim, name, sizes=(size,), dtype=torch.float64, nudge=True)


# ---------------------------------------------------------------------- what the host waits for


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(pool.device())


def batches(count: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12 * count, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (12 * count,), generator=generator))


class Plain:
    """A step as most scripts have it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        self.optimizer.step()


class Cast(Plain):
    """With autocast and, for float16, a scaler."""

    def __init__(self, optimizer: Any, dtype: torch.dtype) -> None:
        super().__init__(optimizer)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(pool.device(), enabled=dtype is torch.float16)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(pool.device(), dtype=self.dtype):
            loss = F.cross_entropy(model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class WithLoss(nn.Module):
    """Its loss is computed in forward, as those of language models are."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        return F.cross_entropy(scores, y) + F.mse_loss(scores, scores.detach() / 2)


class OfWithLoss(Plain):
    """A step of it."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        model(x, y).backward()
        self.optimizer.step()


def make_step(name: str, parameters: Any) -> Plain:
    if name == INSIDE:
        return OfWithLoss(o.SGD(parameters, 0.1))
    if name in OPTIMIZERS:
        return Plain(OPTIMIZERS[name](parameters))
    dtype, _, how = name.partition(", ")
    optimizer: Any = o.AdamW(parameters, fused=True) if how else o.SGD(parameters, 0.1)
    return Cast(optimizer, getattr(torch, dtype))


def waits(name: str, door: str, count: int = 6) -> list[list[str]]:
    """Of each step: the lines of instep in which the host has waited for the device."""
    os.environ["INSTEP_DRIFT_STEPS"] = "0"
    os.environ["INSTEP_DIVIDE"] = "always"
    patched = PatchHandle(SHARDED_CALL_PATCHES if door == "unedited" else ())
    modules.reset()
    is_of_script, control_flow._is_of_script = control_flow._is_of_script, is_of_this_script
    try:
        model = WithLoss(net()) if name == INSIDE else net()
        if door == "explicit":
            model = instep.replicate(model)
        loader: Any = DataLoader(batches(count), 12)
        step, found = make_step(name, model.parameters()), []
        for x, y in instep.shard(loader) if door == "explicit" else loader:
            x, y = x.to(pool.device()), y.to(pool.device())
            with pool.accelerator().counted() as host:
                step(model, x, y)
            lines = host.reads + host.uploads
            found.append([line for line in lines if line.startswith((SRC, "autograd"))])
        assert door == "explicit" or modules.call_counts.whole == 0
    finally:
        patched.remove()
        control_flow._is_of_script = is_of_script
        del os.environ["INSTEP_DRIFT_STEPS"]
    return found


def is_of_this_script(code: CodeType) -> bool:
    """Not the simulated device's: a call is not watched for its branches, which are no script's."""
    return code.co_filename == __file__


INSIDE = "loss inside"
AMP = ("bfloat16", "float16", "float16, fused")


def steps(daily: Sequence[str]) -> list[Any]:
    """The parameters of a test: a kind of step, a door. By day the `daily` ones of replicas."""
    by_day = [(name, "explicit") for name in daily]
    return [
        pytest.param(name, door, marks=() if (name, door) in by_day else pytest.mark.nightly)
        for name in (*OPTIMIZERS, *AMP, INSIDE)
        for door in ("explicit", "unedited")
        if (name, door) != ("divided", "unedited")  # it divides the optimizers of replicas
    ]


@pytest.mark.parametrize(("name", "door"), steps(["float16", INSIDE]))
def test_in_a_step_the_host_waits_for_nothing(name: str, door: str) -> None:
    """Torch's own waits do not count."""
    check_waits(waits, name, door)


def check_waits(waits: Callable[[str, str], list[list[str]]], name: str, door: str) -> None:
    """That there are none after the steps in which the unedited door compares."""
    compared = 4 if name == INSIDE else 1
    for found in pool.run(2, waits, name, door):
        assert found[compared:] == [[]] * (6 - compared)


def compared() -> list[list[str]]:
    """With the comparison of parameters, in its steps alone."""
    import simulated

    os.environ["INSTEP_DRIFT_STEPS"] = "4"
    try:
        model = instep.replicate(net())
        step, found = make_step("SGD", model.parameters()), []
        for x, y in instep.shard(DataLoader(batches(9), 12)):
            with simulated.counted() as host:
                step(model, x.to("sim"), y.to("sim"))
            found.append([line for line in host.reads if line.startswith(SRC)])
    finally:
        del os.environ["INSTEP_DRIFT_STEPS"]
    return found


def test_parameters_and_losses_are_compared_with_one_wait_each() -> None:
    for found in pool.run(2, compared):
        assert {len(lines) for lines in found} == {0, 2}
        for losses, parameters in filter(None, found):
            assert "divisors.py" in losses
            assert "bit_sums.py" in parameters
