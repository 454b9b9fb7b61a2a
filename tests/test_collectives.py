"""Talking: values, derivatives, dtypes and clear errors, at any world size."""

import pytest
import torch

import instep
from instep.distributed.communication import collectives
from instep.distributed.communication.tensors import check_reachable, is_dense
from instep.distributed.communication.transport import get_transport
from instep.distributed.identity import torch_devices
from instep.errors import (
    CollectiveError,
    DisagreementError,
    OverflowedError,
    UnknownOpError,
    UnsuitableTensorError,
    WrongDeviceError,
)
from pool import ranks, run

INTEGERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.uint16),
    *(torch.int32, torch.uint32, torch.int64, torch.uint64),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*INTEGERS, *FLOATS, *COMPLEX]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(1, 2, 3)
def test_all_reduce_adds_up_and_leaves_its_input(dtype):
    values = (torch.arange(6).view(2, 3) + instep.rank).tolist()
    mine = torch.tensor(values).to(dtype)
    total = instep.all_reduce(mine)
    n = instep.world_size
    assert total.dtype == dtype
    assert total.tolist() == (torch.arange(6).view(2, 3) * n + n * (n - 1) // 2).tolist()
    assert mine.tolist() == values


@ranks(1, 2, 3)
def test_all_reduce_knows_mean_min_and_max():
    mine = torch.tensor([float(instep.rank), -float(instep.rank)])
    last = instep.world_size - 1
    assert instep.all_reduce(mine, "mean").tolist() == [last / 2, -last / 2]
    assert instep.all_reduce(mine, "min").tolist() == [0.0, -last]
    assert instep.all_reduce(mine, "max").tolist() == [last, 0.0]


@ranks(2, 3)
def test_all_reduce_takes_tensors_that_are_not_contiguous():
    mine = torch.arange(12.0).view(3, 4).t() * (instep.rank + 1)
    n = instep.world_size
    assert torch.equal(instep.all_reduce(mine), torch.arange(12.0).view(3, 4).t() * n * (n + 1) / 2)


@ranks(1, 2, 3)
def test_broadcast_gives_every_rank_the_roots_tensor():
    for root in range(instep.world_size):
        mine = torch.full((3,), instep.rank)
        assert instep.broadcast(mine, root).tolist() == [root] * 3
        assert mine.tolist() == [instep.rank] * 3


@ranks(2)
def test_a_broadcast_is_known_by_the_dtype_it_was_called_with():
    """The error of a peer that is lost in it names that; Gloo does not know all dtypes."""
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        transport = get_transport()
        broadcast = transport.broadcast
        patch.setattr(
            transport,
            "broadcast",
            lambda part, root: (sent.append((part.dtype, part.numel())), broadcast(part, root))[1],
        )
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64):
            mine = torch.full((2, 3), instep.rank).to(dtype)
            assert instep.broadcast(mine, 1).equal(torch.ones(2, 3, dtype=dtype))
    bytes_of = [(torch.uint8, 12), (torch.uint8, 48)]
    assert sent == [(torch.float32, 6), (torch.int64, 6), *bytes_of]


@ranks(2)
def test_many_tensors_are_broadcast_in_messages_of_limited_size():
    shapes = [(3,), (2, 5), (), (40,), (1, 1), (4,)]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float32, torch.bool, torch.float64]
    tensors = [
        torch.full(shape, 1 + k + 10 * instep.rank).to(dtype)
        for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        transport = get_transport()
        broadcast = transport.broadcast
        patch.setattr(collectives, "_MESSAGE_BYTES", 100)
        patch.setattr(
            transport,
            "broadcast",
            lambda part, root: (sent.append(part.nbytes), broadcast(part, root))[1],
        )
        collectives.broadcast_coalesced(tensors, root=1)
    assert sent == [16, 80, 160, 32, 1]
    for k, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.equal(torch.full(shape, 11 + k).to(tensor.dtype))


@ranks(1, 2, 3)
def test_all_gather_keeps_the_order_of_ranks():
    parts = instep.all_gather(torch.tensor([[instep.rank, 7]]))
    assert [part.tolist() for part in parts] == [[[r, 7]] for r in range(instep.world_size)]


@ranks(1, 2, 3)
def test_objects_travel():
    assert instep.all_gather_object({"rank": instep.rank}) == [
        {"rank": r} for r in range(instep.world_size)
    ]
    assert instep.broadcast_object(("from", instep.rank), instep.world_size - 1) == (
        "from",
        instep.world_size - 1,
    )
    gathered = instep.gather_object(instep.rank, root=0)
    assert gathered == (list(range(instep.world_size)) if instep.rank == 0 else None)


@ranks(1, 2)
def test_reductions_have_torch_s_names_too():
    mine = torch.tensor([instep.rank + 1.0, 2.0])
    for theirs, ours in (("avg", "mean"), ("prod", "product")):
        assert torch.equal(instep.all_reduce(mine, theirs), instep.all_reduce(mine, ours))
        assert torch.equal(instep.reduce(mine, theirs), instep.reduce(mine, ours))
        assert torch.equal(instep.reduce_scatter(mine, theirs), instep.reduce_scatter(mine, ours))


@ranks(1, 2)
def test_misuse_says_what_was_seen_and_what_to_do():
    with pytest.raises(UnknownOpError, match=r"unknown reduction 'average'; known are sum, mean"):
        instep.all_reduce(torch.ones(2), "average")
    with pytest.raises(CollectiveError, match=r"mean of torch\.int64"):
        instep.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
    with pytest.raises(WrongDeviceError, match="this tensor is on meta"):
        instep.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="root 9 does not exist: the ranks are 0 to"):
        instep.broadcast(torch.ones(2), root=9)
    with pytest.raises(UnsuitableTensorError, match="complex64 has no order"):
        instep.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    with pytest.raises(UnsuitableTensorError, match=r"sparse_coo\. Call to_dense\(\) first"):
        instep.all_reduce(torch.eye(2).to_sparse())
    with pytest.raises(UnsuitableTensorError, match="takes tensors, not list"):
        instep.all_gather([1, 2])
    with pytest.raises(UnsuitableTensorError, match="no dimension 0 to divide"):
        instep.all_to_all(torch.tensor(1))
    with pytest.raises(ValueError, match=r"add up to 4, one for each rank; got \[9\]"):
        instep.all_to_all(torch.ones(4), splits=[9])
    with pytest.raises(ValueError, match="rank 9 does not exist"):
        instep.send(torch.ones(2), to=9)
    with pytest.raises(ValueError, match=f"rank {instep.rank} is this rank itself"):
        instep.recv(instep.rank)


def before_and_after(folder):
    for k in range(3):
        (folder / f"{k} {instep.rank}").touch()
        instep.barrier()
        arrived = [(folder / f"{k} {rank}").exists() for rank in range(instep.world_size)]
        assert all(arrived), arrived


@pytest.mark.parametrize("size", [2, 3])
def test_behind_a_barrier_all_ranks_have_come_to_it(tmp_path, size):
    run(size, before_and_after, tmp_path)


# ------------------------------------------------------------------------------ every dtype


@ranks(1, 2, 3)
def test_min_max_and_product_keep_every_dtype():
    for dtype in DTYPES:
        mine = (torch.tensor([[1, 3], [2, 0]]) + instep.rank).to(dtype)
        everybody = torch.stack(
            [torch.tensor([[1, 3], [2, 0]]) + r for r in range(instep.world_size)]
        )
        product = instep.all_reduce(mine, "product")
        assert product.dtype == dtype
        assert product.tolist() == everybody.prod(0).tolist()
        if not dtype.is_complex:
            assert instep.all_reduce(mine, "min").tolist() == everybody.amin(0).tolist()
            assert instep.all_reduce(mine, "max").tolist() == everybody.amax(0).tolist()


@ranks(2, 3)
def test_every_dtype_changes_ranks_unchanged():
    n, r = instep.world_size, instep.rank
    for dtype in [*DTYPES, torch.bool]:
        of = [torch.arange(6).view(2, 3).t().to(dtype)[k % 3 :] for k in range(n)]
        mine = of[r]

        def same(got, expected):
            return got.dtype == expected.dtype and got.tolist() == expected.tolist()

        assert same(instep.broadcast(of[0] if r == 1 else torch.zeros_like(of[0]), 1), of[0])
        assert all(map(same, instep.all_gather(mine), of))
        gathered = instep.gather(mine, 1)
        assert all(map(same, gathered, of if r == 1 else [mine.new_empty(0)] * n))
        assert same(instep.scatter(of if r == 1 else None, 1), mine)
        for part, theirs in zip(instep.all_to_all(mine), of, strict=True):
            rows = len(theirs)
            assert same(part, theirs[r * rows // n : (r + 1) * rows // n])
        if r == 0:
            instep.send(mine, 1)
        elif r == 1:
            assert same(instep.recv(0), of[0])


@ranks(1, 2, 3)
def test_sums_of_truth_values_are_logical():
    mine = torch.tensor([True, False, instep.rank == 0, True])
    alone = instep.world_size == 1
    for op in ("sum", "max"):
        assert instep.all_reduce(mine, op).tolist() == [True, False, True, True]
    for op in ("product", "min"):
        assert instep.all_reduce(mine, op).tolist() == [True, False, alone, True]


@ranks(2, 3)
def test_an_integer_sum_that_does_not_fit_raises_instead_of_wrapping():
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32):
        mine = torch.tensor([1, torch.iinfo(dtype).max]).to(dtype)
        with pytest.raises(OverflowedError, match=f"{dtype} cannot hold"):
            instep.all_reduce(mine)
        with pytest.raises(OverflowedError, match="the product over ranks reaches"):
            instep.all_reduce(mine, "product")
    least = torch.tensor([torch.iinfo(torch.int8).min], dtype=torch.int8)
    with pytest.raises(OverflowedError, match=f"reaches {-128 * instep.world_size}"):
        instep.all_reduce(least)


@ranks(2, 3)
def test_unsigned_64_bit_integers_have_their_own_order():
    values = [2**64 - 1, 1, 2**63]
    mine = torch.tensor([values[instep.rank]], dtype=torch.uint64)
    n = instep.world_size
    assert instep.all_reduce(mine, "max").tolist() == [max(values[:n])]
    assert instep.all_reduce(mine, "min").tolist() == [min(values[:n])]
    assert instep.all_reduce(mine).tolist() == [sum(values[:n]) % 2**64]


@ranks(3)
def test_half_precision_is_rounded_once():
    mine = torch.tensor([60000.0, 2048.0 if instep.rank == 0 else 1.0])
    assert instep.all_reduce(mine.half(), "mean").tolist()[0] == 60000
    assert instep.all_reduce(mine.half()).tolist()[1] == 2050
    ones = torch.tensor([256.0 if instep.rank == 0 else 1.0], dtype=torch.bfloat16)
    assert instep.all_reduce(ones).tolist() == [258]


@ranks(2, 3)
def test_a_nan_of_any_rank_is_the_smallest_and_the_largest():
    for holder in range(instep.world_size):
        for dtype in FLOATS:
            values = [float("nan"), 1.0] if instep.rank == holder else [2.0, 3.0]
            mine = torch.tensor(values, dtype=dtype)
            for op in ("min", "max"):
                for result in (instep.all_reduce(mine, op), *instep.all_gather(mine)[holder:][:1]):
                    assert result.isnan().tolist() == [True, False]


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@ranks(1, 2, 3)
def test_empty_zero_dimensional_and_conjugated_tensors_are_tensors_too(op):
    n, r = instep.world_size, instep.rank
    for shape in ((0,), (3, 0, 2), ()):
        mine = torch.full(shape, 2.0)
        assert instep.all_reduce(mine, op).shape == shape
        assert instep.broadcast(mine, n - 1).shape == shape
        assert [part.shape for part in instep.all_gather(mine)] == [shape] * n
        assert instep.reduce(mine, op, n - 1).shape == (shape if r == n - 1 else (0,))
        if op != "mean":
            assert instep.all_reduce(mine.to(torch.uint8), op).shape == shape
    assert instep.reduce_scatter(torch.ones(0, 2), op).shape == (0, 2)
    if op == "sum":
        conjugated = torch.tensor([1 + 2j]).conj()
        assert instep.all_reduce(conjugated).tolist() == [n * (1 - 2j)]
        assert instep.broadcast(conjugated).tolist() == [1 - 2j]
        assert instep.all_gather(conjugated)[-1].tolist() == [1 - 2j]


# ------------------------------------------------------------------- who gets which numbers


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@ranks(1, 2, 3)
def test_reduce_is_all_reduce_at_the_root_and_nothing_elsewhere(op):
    mine = torch.tensor([instep.rank + 1.0, -2.0 * instep.rank])
    total = instep.all_reduce(mine, op)
    for root in range(instep.world_size):
        reduced = instep.reduce(mine, op, root)
        assert reduced.tolist() == (total.tolist() if instep.rank == root else [])


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@ranks(1, 2, 3)
def test_reduce_scatter_is_the_own_rows_of_all_reduce(op):
    n, r = instep.world_size, instep.rank
    mine = torch.arange(10.0).view(5, 2) * (-1) ** r + r
    total = instep.all_reduce(mine, op)
    assert torch.equal(instep.reduce_scatter(mine, op), total[r * 5 // n : (r + 1) * 5 // n])
    splits = [5, 0, 0][:n]
    assert torch.equal(instep.reduce_scatter(mine, op, splits), total if r == 0 else total[:0])


@ranks(1, 2, 3)
def test_all_gather_takes_ranks_with_more_fewer_and_no_rows():
    mine = torch.full((instep.rank % 2 * 3, 2), float(instep.rank))
    parts = instep.all_gather(mine)
    assert [tuple(part.shape) for part in parts] == [
        (r % 2 * 3, 2) for r in range(instep.world_size)
    ]
    assert torch.cat(parts).unique().tolist() == ([1.0] if instep.world_size > 1 else [])


@ranks(1, 2, 3)
def test_all_to_all_with_splits_gives_each_rank_its_rows():
    n, r = instep.world_size, instep.rank
    splits = [(r + to) % 3 for to in range(n)]
    rows = torch.cat([torch.full((k, 2), 10 * r + to) for to, k in enumerate(splits)])
    for source, part in enumerate(instep.all_to_all(rows, splits)):
        assert part.tolist() == [[10 * source + r] * 2] * ((source + r) % 3)


@ranks(2, 3)
def test_a_result_may_be_changed_in_place_without_spoiling_the_others():
    x = torch.ones(instep.rank + 1, requires_grad=True)
    first, second, *_ = instep.all_gather(x)
    loss = second.exp().sum()
    first.detach().mul_(5)
    loss.backward()
    if instep.rank == 1:
        assert x.grad.tolist() == pytest.approx([instep.world_size * 2.718281828] * 2)


@ranks(2, 3)
def test_what_does_not_fit_together_is_an_error_on_every_rank():
    with pytest.raises(DisagreementError, match=r"float32 on ranks? 0.*float64 on rank 1"):
        instep.all_gather(torch.ones(2, dtype=torch.float64 if instep.rank == 1 else torch.float32))
    with pytest.raises(DisagreementError, match="only dimension 0 may differ"):
        instep.gather(torch.ones(2, 3 if instep.rank == 1 else 4))
    with pytest.raises(DisagreementError, match="Make them equal"):
        instep.reduce_scatter(torch.ones(5 if instep.rank == 1 else 4))
    with pytest.raises(ValueError, match="one part for each of"):
        instep.scatter([torch.ones(1)] if instep.rank == 0 else None)
    with pytest.raises(UnsuitableTensorError, match=r"one dtype on one device, not torch\.float"):
        instep.scatter([torch.ones(1).to(FLOATS[r]) for r in range(instep.world_size)])
    instep.barrier()


@ranks(1, 2, 3)
def test_what_nobody_wants_a_gradient_of_requires_none():
    n, last = instep.world_size, instep.world_size - 1
    x = torch.ones(n, 2)
    results = [
        *(instep.all_reduce(x, op) for op in ("sum", "mean", "min", "product")),
        *(instep.reduce(x), instep.reduce_scatter(x), instep.broadcast(x, last)),
        *(*instep.all_gather(x), *instep.all_gather(x[instep.rank :])),
        *(*instep.gather(x, last), instep.scatter([x] * n), *instep.all_to_all(x)),
    ]
    assert not any(result.requires_grad for result in results)


@ranks(1)
def test_scatter_takes_what_can_be_sent():
    with pytest.raises(WrongDeviceError, match="this tensor is on meta"):
        instep.scatter([torch.ones(2, device="meta")])
    with pytest.raises(UnsuitableTensorError, match=r"Call to_dense\(\) first"):
        instep.scatter([torch.eye(2).to_sparse()])


def test_a_rank_with_a_gpu_can_send_from_that_one(monkeypatch):
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    with pytest.raises(WrongDeviceError, match="cuda:3"):
        check_reachable(torch.ones(2, device="meta"))
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: None)
    with pytest.raises(WrongDeviceError, match=r"^(?!.*cuda)"):
        check_reachable(torch.ones(2, device="meta"))


def test_a_tensor_is_dense_where_its_elements_are_one_piece_of_memory_in_some_order():
    x = torch.empty(2, 3, 4)
    dense = [x, x.permute(2, 0, 1), x[:1], x.permute(2, 0, 1)[:, :1, :].select(2, 0).t()[:, :0]]
    dense += [torch.empty_strided((3, 1, 2), (1, 7, 3)), torch.empty_strided((1, 2), (0, 1))]
    gaps = [x[:, :2], x[:, :, ::2], x.expand(2, 2, 3, 4), torch.empty_strided((2, 1), (3, 1))]
    assert [is_dense(tensor) for tensor in [*dense, *gaps]] == [True] * 6 + [False] * 4
    for tensor in (*dense, *gaps):  # as torch tells which layout it keeps
        keeps = torch.empty_like(tensor).stride() == tensor.stride()
        assert is_dense(tensor) == (keeps or tensor.is_contiguous())
