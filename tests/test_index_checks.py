"""Indices out of range are an error before a kernel runs, so that a trial on a GPU survives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import instep
from instep.process.torch_private.dispatch import OperationMode
from instep.training.draws.kernels import DrawMode
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.shards import index_checks
from instep.unedited.sharded_call.shards.index_checks import IndexChecks
from instep.unedited.sharded_call.shards.shard_threads import ShardThreads
from pool import ranks
from sharded_training import sharding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:index_reduce:UserWarning",
        "ignore:indexing with dtype torch.uint8:UserWarning",
        "ignore:The reduce argument of torch.scatter:UserWarning",
        "ignore:scatter_reduce:UserWarning",
    ),
]
aten = torch.ops.aten
T = torch.tensor


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def bag(offsets: list[int], indices: list[int] | None = None, **options: Any) -> Tensor:
    table = ones(3, 2).requires_grad_()
    return F.embedding_bag(T(indices or [0, 2, 1]), table, T(offsets), **options)


Operation = Callable[[Any], Any]
OPERATIONS: list[tuple[str, Operation, list[Any], list[Any]]] = [
    # The name, the operation, what is in its range, and what is not.
    ("index", lambda i: zeros(3)[T(i).long()], [[0, 2], [-3], []], [[3], [-4], [0, 7, 1]]),
    ("index", lambda i: zeros(2, 3)[:, T(i)], [[2], [-3]], [[3], [-4]]),
    ("index", lambda i: zeros(2, 3)[T([True, False]), T(i)], [[2]], [[3]]),
    ("index", lambda i: zeros(3, 2, 2)[T([[1, 0], [0, 1], [1, 1]]).bool(), T(i)], [[1]], [[2]]),
    ("index", lambda i: zeros(3)[T(i, dtype=torch.uint8)], [[0, 1, 9]], []),
    ("index_put", lambda i: zeros(3).index_put((T(i),), T(1.0)), [[2], [-3]], [[3], [-4]]),
    ("index_put_", lambda i: zeros(3).index_put_((T(i),), T(1.0)), [[-3]], [[3], [-4]]),
    (
        "_index_put_impl_",
        lambda i: aten._index_put_impl_(zeros(3), (T(i),), T(1.0)),
        [[2]],
        [[3]],
    ),
    ("_unsafe_index", lambda i: aten._unsafe_index(zeros(3), (T(i),)), [[2]], [[3]]),
    (
        "_unsafe_index_put",
        lambda i: aten._unsafe_index_put(zeros(3), (T(i),), T(1.0)),
        [[2]],
        [[3]],
    ),
    ("index_select", lambda i: zeros(2, 3).index_select(-1, T(i).long()), [[2], []], [[3], [-1]]),
    ("gather", lambda i: zeros(3).gather(0, T(i)), [[2, 2]], [[3], [-1]]),
    ("gather", lambda i: torch.take_along_dim(zeros(3), T(i), 0), [[2]], []),
    ("scatter", lambda i: zeros(3).scatter(0, T(i), 1.0), [[2]], [[3], [-1]]),
    ("scatter", lambda i: zeros(3).scatter(0, T(i), ones(1)), [[2]], [[3]]),
    ("scatter", lambda i: zeros(3).scatter(0, T(i), ones(1), reduce="add"), [[2]], [[3]]),
    ("scatter_", lambda i: zeros(3).scatter_(0, T(i), 1.0), [[2]], [[3]]),
    ("scatter_", lambda i: F.one_hot(T(i), 3), [[2]], []),
    ("scatter_add", lambda i: zeros(3).scatter_add(0, T(i), ones(1)), [[2]], [[3]]),
    ("scatter_add_", lambda i: zeros(3).scatter_add_(0, T(i), ones(1)), [[2]], [[3]]),
    ("scatter_reduce", lambda i: zeros(3).scatter_reduce(0, T(i), ones(1), "amax"), [[2]], [[3]]),
    (
        "scatter_reduce_",
        lambda i: zeros(3).scatter_reduce_(0, T(i), ones(1), "amax"),
        [[2]],
        [[3]],
    ),
    ("index_add", lambda i: zeros(3).index_add(0, T(i), ones(1)), [[2]], [[3], [-1]]),
    ("index_add_", lambda i: zeros(3).index_add_(0, T(i), ones(1)), [[2]], [[3]]),
    ("index_copy", lambda i: zeros(3).index_copy(0, T(i), ones(1)), [[2]], [[3], [-1]]),
    ("index_copy_", lambda i: zeros(3).index_copy_(0, T(i), ones(1)), [[2]], [[3]]),
    ("index_fill", lambda i: zeros(3).index_fill(0, T(i), 1.0), [[2], [-3]], [[3], [-4]]),
    ("index_fill_", lambda i: zeros(3).index_fill_(0, T(i), T(1.0)), [[2]], [[3]]),
    ("index_reduce", lambda i: zeros(3).index_reduce(0, T(i), ones(1), "prod"), [[2]], [[3]]),
    ("index_reduce_", lambda i: zeros(3).index_reduce_(0, T(i), ones(1), "prod"), [[2]], [[3]]),
    ("take", lambda i: zeros(2, 3).take(T(i)), [[5], [-6]], [[6], [-7]]),
    ("put", lambda i: zeros(3).put(T(i), ones(1)), [[2], [-3]], [[3]]),
    ("put_", lambda i: zeros(3).put_(T(i), ones(1)), [[2], [-3]], [[3], [-4]]),
    ("embedding", lambda i: F.embedding(T(i), ones(3, 2), padding_idx=1), [[2, 1]], [[3], [-1]]),
    ("embedding_renorm_", lambda i: F.embedding(T(i), ones(3, 2), max_norm=1.0), [[2]], [[3]]),
    ("_embedding_bag", lambda i: bag([0, 1], i), [[2, 0]], [[3, 0], [0, -1]]),
    ("_embedding_bag", bag, [[0, 2], [0, 0, 3]], [[1, 2], [0, 4], [0, 2, 1]]),
    ("_embedding_bag", lambda o: bag(o, include_last_offset=True), [[0, 1, 3]], [[0, 1, 4]]),
    (
        "_embedding_bag",
        lambda o: bag(o, per_sample_weights=ones(3), mode="sum"),
        [[0, 2]],
        [[1, 2]],
    ),
    (
        "_embedding_bag_forward_only",
        lambda o: aten._embedding_bag_forward_only(ones(3, 2), T([0, 1]), T(o)),
        [[0, 2]],
        [[0, 3]],
    ),
    (
        "segment_reduce",
        lambda n: torch.segment_reduce(ones(3), "sum", offsets=T(n)),
        [[0, 1, 3]],
        [[0, 3, 2, 3]],
    ),
    ("nll_loss_forward", lambda y: F.cross_entropy(zeros(2, 3), T(y)), [[0, 2]], [[0, 3], [-1, 0]]),
    (
        "nll_loss_forward",
        lambda y: F.nll_loss(zeros(2, 3), T(y), ignore_index=9),
        [[9, 2]],
        [[3, 9]],
    ),
    ("nll_loss_forward", lambda y: F.nll_loss(zeros(3), T(y)), [2, -100], [3]),
    ("nll_loss2d_forward", lambda y: F.nll_loss(zeros(1, 3, 1, 2), T(y)), [[[[0, 2]]]], []),
    ("nll_loss2d_forward", lambda y: F.nll_loss(zeros(1, 3, 2), T(y)), [[[0, -100]]], [[[0, 3]]]),
    ("multi_margin_loss", lambda y: F.multi_margin_loss(zeros(2, 3), T(y)), [[0, 2]], [[0, 3]]),
    (
        "multilabel_margin_loss_forward",
        lambda y: F.multilabel_margin_loss(zeros(1, 3), T(y)),
        [[[0, 2, -1]]],
        [[[0, 3, -1]], [[-2, 0, 0]]],
    ),
    (
        "repeat_interleave",
        lambda n: ones(3).repeat_interleave(T(n), output_size=6),
        [[1, 2, 3], [6, 0, 0]],
        [[1, 2, 2]],
    ),
    ("repeat_interleave", lambda n: ones(2).repeat_interleave(T(n)), [[0, 1], 2], [[1, -1]]),
    (
        "masked_scatter",
        lambda m: zeros(2, 3).masked_scatter(T(m), ones(2)),
        [[True, False, False]],
        [[True, True, False]],
    ),
    (
        "masked_scatter_",
        lambda m: zeros(3).masked_scatter_(T(m) > 0, ones(1)),
        [[1, 0, 0]],
        [[1, 0, 1]],
    ),
    ("_assert_async", lambda x: aten._assert_async(T(x)), [True, 2], [False]),
    ("_assert_async", lambda x: aten._assert_async.msg(T(x), "no"), [True], [False]),
    (
        "_functional_assert_async",
        lambda x: aten._functional_assert_async.msg(T(x), "no", T(0)),
        [True],
        [False],
    ),
    (
        "binary_cross_entropy",
        lambda p: F.binary_cross_entropy(T(p), ones(2)),
        [[0.0, 1.0]],
        [[0.5, 1.5], [-0.5, 0.5], [float("nan"), 0.5]],
    ),
    ("bernoulli", lambda p: torch.bernoulli(T(p)), [[0.5]], [[1.5]]),
    ("bernoulli", lambda p: torch.bernoulli(T([7.0]), p), [0.5], []),
    ("bernoulli_", lambda p: zeros(1).bernoulli_(T(p)), [[0.5]], [[-0.5]]),
    ("bernoulli_", lambda p: zeros(1).bernoulli_(p), [0.5], []),
    (
        "multinomial",
        lambda w: torch.multinomial(T(w), 1),
        [[0.0, 3.0]],
        [[0.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [float("nan"), 1.0]],
    ),
]
CASES = [
    pytest.param(operation, value, is_valid, id=f"{name}-{value}")
    for name, operation, valid, wrong in OPERATIONS
    for values, is_valid in ((valid, True), (wrong, False))
    for value in values
]


class Seen(OperationMode):
    """Below the checks: the operations whose kernels are about to run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs or {})


@contextmanager
def two_threads() -> Iterator[None]:
    """With one, the CPU's embedding bag does not see offsets that decrease."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("operation", "value", "is_valid"), CASES)
def test_what_the_kernel_of_the_cpu_refuses_does_not_reach_a_kernel(
    operation: Operation, value: Any, is_valid: bool
) -> None:
    torch.manual_seed(0)
    if is_valid:
        expected = operation(value)
        torch.manual_seed(0)
        with IndexChecks():
            torch.testing.assert_close(operation(value), expected, equal_nan=True)
        return
    with pytest.raises((IndexError, RuntimeError)), two_threads():
        operation(value)
    with Seen() as seen, pytest.raises((IndexError, RuntimeError)) as raised, IndexChecks():
        operation(value)
    assert raised.traceback[-1].path.name == "index_checks.py"
    assert not seen.names or seen.names[-1] not in index_checks._CHECKS


@pytest.mark.parametrize("name", index_checks._CHECKS)
def test_each_operation_that_is_checked_is_in_this_table(name: str) -> None:
    assert name in {of for of, *_ in OPERATIONS}
    assert hasattr(aten, name)


@pytest.mark.parametrize(("name", "operation"), [(name, each) for name, each, _, _ in OPERATIONS])
def test_the_table_names_what_its_operations_call(name: str, operation: Operation) -> None:
    valid = next(valid for _, each, valid, _ in OPERATIONS if each is operation)
    with Seen() as seen, IndexChecks():
        operation(valid[0])
    assert name in seen.names


# ------------------------------------------------------------------------ what runs beneath it


def refused(operation: Callable[[], object]) -> bool:
    """Whether it is, by the checks."""
    with pytest.raises(IndexError) as raised, IndexChecks():
        operation()
    return bool(raised.traceback[-1].path.name == "index_checks.py")


class Wrapped(Tensor):
    """A tensor that handles operations by those of another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(x.inner if isinstance(x, Wrapped) else x for x in args), **kwargs or {})


@pytest.mark.parametrize("offsets", [[0, 4], [-1, 3]])
def test_segments_out_of_range_are_refused_which_the_kernel_of_the_cpu_reads(
    offsets: list[int],
) -> None:
    with pytest.raises(RuntimeError, match="offsets are not within the 3 rows"), IndexChecks():
        torch.segment_reduce(ones(3), "sum", offsets=T(offsets))


def test_what_a_subclass_or_a_transform_makes_of_an_operation_is_checked() -> None:
    assert refused(lambda: Wrapped(zeros(3))[T([3])])
    assert refused(lambda: torch.vmap(lambda x, i: x.take(i))(zeros(2, 3), T([[0], [6]])))
    assert refused(lambda: torch.func.grad(lambda x: x[T([3])].sum())(zeros(3)))
    with torch.autocast("cpu", torch.bfloat16):
        assert refused(lambda: (zeros(3, 3) @ zeros(3, 3))[T([3])])
    with torch.inference_mode():
        assert refused(lambda: zeros(3)[T([3])])
    with DrawMode(lambda func, args, kwargs: func(*args, **kwargs)):
        assert refused(lambda: F.dropout(zeros(3), 0.5)[T([3])])
    assert refused(lambda: take_later(DrawMode))


def take_later(mode: Any) -> None:
    with mode(lambda func, args, kwargs: func(*args, **kwargs)):
        F.dropout(zeros(3), 0.5)[T([3])]


def test_what_backward_computes_is_checked() -> None:
    places = T([1, 2])
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(lambda x: x[places].square(), x, use_reentrant=False)
    with IndexChecks():
        out.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 2]
    out = checkpoint(lambda x: x[places].square(), x, use_reentrant=False)
    places.add_(1)
    assert refused(out.sum().backward)


def test_shards_that_run_as_threads_are_checked() -> None:
    def forward() -> None:
        zeros(3)[T([3])]

    assert refused(lambda: ShardThreads(2, lambda number: None).run([forward, forward]))


def test_tensors_without_values_and_operations_without_a_schema_pass() -> None:
    with IndexChecks():
        torch.empty(3, device="meta")[torch.empty(2, dtype=torch.int64, device="meta")]
        found = torch.cond(T(True), lambda x: x + 1, lambda x: x - 1, (zeros(1),))
    assert found.item() == 1


# ----------------------------------------------------------------------------------- in trials


class Messages(nn.Module):
    """Sums over the neighbours in a graph."""

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(4, 3), add

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.add(self.linear(x), edges[0], edges[1]).cos()  # no sum over edges


MESSAGES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, a, b: torch.zeros_like(x).index_add_(0, b, x[a]),
    "scatter_add": lambda x, a, b: torch.zeros_like(x).scatter_add(
        0, b[:, None].expand(-1, 3), x.gather(0, a[:, None].expand(-1, 3))
    ),
    "dropout": lambda x, a, b: F.dropout(x, 0.5)[a].index_select(0, b),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "") for name in MESSAGES if name != "index_add"),
        pytest.param("index_add", "", marks=pytest.mark.nightly),
        ("index_add", "eager"),
        pytest.param("dropout", "aot_eager", marks=pytest.mark.nightly),
    ],
)
@ranks(2)
def test_a_model_that_indexes_its_rows_stays_whole(name: str, backend: str) -> None:
    model: Any = Messages(MESSAGES[name])
    edges = torch.stack([torch.arange(10) % 8, torch.arange(10).roll(3) % 8])
    check_whole(
        torch.compile(model, backend=backend) if backend else model, torch.randn(8, 4), edges
    )


CHECKS = index_checks._CHECKS
refusals = 0


def noted(check: Callable[[Any], None]) -> Callable[[Any], None]:
    def noting(given: Any) -> None:
        global refusals
        try:
            check(given)
        except (IndexError, RuntimeError):
            refusals += 1
            raise

    return noting


def check_whole(model: nn.Module, *args: Tensor) -> None:
    """As on a device that a wrong index would make unusable."""
    global refusals
    refusals = 0
    torch.manual_seed(1)
    with torch.compiler.set_stance("force_eager"):
        expected = model(*args)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with sharding() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCall, "is_on_accelerator", True)
        patch.setattr(index_checks, "_CHECKS", {k: noted(v) for k, v in CHECKS.items()})
        torch.manual_seed(1)
        found = model(*args)
        found.sum().backward()
    assert instep.all_reduce(torch.tensor(refusals), "max") > 0
    assert modules.call_counts.whole == 1
    assert ("cannot be computed for some of its rows" in log.getvalue()) == (instep.rank == 0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 0.3)
        torch._dynamo.graph_break()
        return y.gather(1, places).cos()


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["", "eager", pytest.param("aot_eager", marks=pytest.mark.nightly)]
)
@ranks(2)
def test_a_model_that_indexes_within_its_rows_is_divided(backend: str) -> None:
    plain = Compiled()
    model: Any = torch.compile(plain, backend=backend) if backend else plain
    check_divided(model, torch.randn(8, 4), torch.randint(3, (8, 2)))


@pytest.mark.slow
@ranks(2)
def test_bags_of_embeddings_with_offsets_are_divided() -> None:
    check_divided(nn.EmbeddingBag(5, 3), torch.randint(5, (8,)), T([0, 2, 3, 7]))


def check_divided(model: nn.Module, *args: Tensor) -> None:
    torch.manual_seed(1)
    with torch.compiler.set_stance("force_eager"):
        expected = model(*args)
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCall, "is_on_accelerator", True)
        for _ in range(3):
            torch.manual_seed(1)
            found = model(*args)
            found.sum().backward()
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (3, 0)
    torch.testing.assert_close(found, expected)
