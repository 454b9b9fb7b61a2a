"""Lists of tensors of all ranks, gathered without packing: through the mapping, or read where they
are in the other ranks' private memory."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import instep
from instep.distributed.communication.transport import get_transport
from instep.distributed.shm import exchange as exchanges
from instep.distributed.shm.memory.peer_memory import PeerMemory
from pool import ranks, run, talking_over

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs Linux on x86-64"
    ),
]

SIZES = {
    "small": [[3, 5], [1], [7]],
    "one rank has none": [[], [4], [2, 2]],
    "nothing": [[], [], []],
    "empty tensors": [[0, 2], [0], [1, 0]],
    "several chunks": [[700_000, 3, 900_000], [1_100_000], [5, 300_000]],
    "many": [[11] * 3000, [300_000], [1]],
}
AT_NIGHT = ("small", "several chunks")
"""By day these pass through buffers only."""


def tensors(sizes, dtype):
    """Of every rank, each with numbers of its own."""
    return [
        [
            torch.arange(size).mul(7 * rank + number + 1).remainder(100).to(dtype)
            for number, size in enumerate(each)
        ]
        for rank, each in enumerate(sizes)
    ]


def current_exchange():
    return get_transport()._shm_group._exchange


@ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "directly"),
    [
        pytest.param(
            name, directly, marks=pytest.mark.nightly if directly and name in AT_NIGHT else ()
        )
        for name in SIZES
        for directly in (True, False)
    ],
)
def test_every_rank_gets_the_others_tensors(name, directly) -> None:
    exchange = current_exchange()
    assert exchange.peer_memory is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "_DIRECT_BYTES", 0)
        if not directly:
            patch.setattr(exchange, "peer_memory", None)
        gather_and_compare(name)


def gather_and_compare(name) -> None:
    for dtype in (torch.float32, torch.bool, torch.complex128):
        whole = tensors(SIZES[name][: instep.world_size], dtype)
        parts = [
            [each.clone() if rank == instep.rank else torch.zeros_like(each) for each in row]
            for rank, row in enumerate(whole)
        ]
        get_transport().all_gather_each(parts)
        for row, expected in zip(parts, whole, strict=True):
            assert all(map(torch.equal, row, expected))


@pytest.mark.parametrize("name", SIZES)
def test_over_gloo_too(name) -> None:
    with talking_over("gloo"):
        run(2, gather_and_compare, name)


def deny(*_):
    raise PermissionError(1, "Operation not permitted")


@ranks(3)
def test_where_one_rank_is_denied_later_none_reads_directly_any_more() -> None:
    group = dist.new_group()
    exchange = group._exchange
    assert exchange.peer_memory is not None
    with pytest.MonkeyPatch.context() as patch:
        if instep.rank == 1:
            patch.setattr(PeerMemory, "read_each", deny)
        mine = torch.full((1_000_000,), float(instep.rank))
        parts = [mine if rank == instep.rank else torch.empty_like(mine) for rank in range(3)]
        group.all_gather_each_now([[part] for part in parts])
    assert [part[-1].item() for part in parts] == [0.0, 1.0, 2.0]
    assert exchange.peer_memory is None
    dist.destroy_process_group(group)


@ranks(5)  # from 4 ranks on sums have buffers
def test_a_group_may_have_as_little_staging_as_one_of_very_many_ranks(monkeypatch) -> None:
    """A share is then shorter than what each rank reduces by itself, and a list of tensors longer
    than the list of addresses for which there is room."""
    monkeypatch.setattr(exchanges, "_PART_BYTES", 64 << 10)
    monkeypatch.setattr(exchanges, "_DIRECT_BYTES", 0)
    group = dist.new_group()
    most = (64 << 10) // 5 // 4  # with 64 KiB of all ranks together
    for numel in (most, most + 1):
        mine = torch.arange(float(numel)) * (instep.rank + 1)
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, torch.arange(float(numel)) * 15)
    flat = torch.arange(9000.0)
    mine = [*(flat * (instep.rank + 1)).split(1)]
    parts = [mine if rank == instep.rank else [*(flat * 0).split(1)] for rank in range(5)]
    group.all_gather_each_now(parts)
    for rank, part in enumerate(parts):
        assert torch.equal(torch.cat(part), flat * (rank + 1))
    dist.destroy_process_group(group)


WIDE = """
import torch
from torch import nn
model = nn.Linear(3, 400_000)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    loss = (model(torch.ones(4, 3)) * torch.ones(4, 400_000)).mean()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.3f}")
"""


@pytest.mark.launch
@pytest.mark.nightly
def test_a_rank_that_may_not_trace_the_others_any_more_gets_large_outputs(tmp_path) -> None:
    """Ranks of an unedited script other than 0 restrict themselves at the first sharded call."""
    (tmp_path / "train.py").write_text(WIDE)
    alone, many = (
        subprocess.run(
            [sys.executable, "-m", "instep", "run", "-n", n, "train.py"],
            cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"INSTEP_SEED": "0"},
        )
        for n in "12"
    )  # fmt: skip
    assert (many.stdout, many.stderr) == (alone.stdout, "")


@ranks(3)
def test_where_one_rank_is_denied_none_reads_directly() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if instep.rank == 1:
            patch.setattr(PeerMemory, "read_each", deny)
        group = dist.new_group()
    exchange = group._exchange
    assert exchange.peer_memory is None
    mine = torch.full((1_000_000,), float(instep.rank))
    parts = [mine if rank == instep.rank else torch.empty_like(mine) for rank in range(3)]
    group.all_gather_each_now([[part] for part in parts])
    assert [part[-1].item() for part in parts] == [0.0, 1.0, 2.0]
    dist.destroy_process_group(group)


@ranks(2)
def test_a_large_all_gather_is_that_of_the_mapping() -> None:
    exchange = current_exchange()
    mine = torch.randn(700_001, generator=torch.Generator().manual_seed(instep.rank))
    directly = get_transport().all_gather(mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "peer_memory", None)
        staged = get_transport().all_gather(mine)
    assert all(map(torch.equal, directly, staged))


def test_memory_that_cannot_be_read_is_an_error_of_the_system() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = PeerMemory([process.pid])
    target = torch.zeros(4)
    with pytest.raises(OSError, match="Bad address"):
        memory.read(0, 8, target)
    process.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        memory.read(0, 8, target)


def test_many_pieces_take_several_system_calls() -> None:
    own = torch.arange(5000)
    targets = [torch.zeros(1, dtype=torch.int64) for _ in own]
    PeerMemory([os.getpid()]).read_each(0, [part.data_ptr() for part in own.unbind()], targets)
    assert torch.equal(torch.cat(targets), own)
