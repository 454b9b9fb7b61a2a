"""Calls that are compared in a higher precision: forwards under autocast, or with products of
float32 in fewer bits, that take less from other rows than these round; and gradients of float32
that another rounding changes."""

from __future__ import annotations

import contextlib
import io
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.process.torch_private.devices import fp32_precision, set_fp32_precision
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.compare.higher_precision import full_float32
from instep.unedited.sharded_call.compare.probes.dependencies import autocast_cache_off
from pool import ranks
from sharded_training import batches, sharding

pytestmark = pytest.mark.slow

SHARE = 1e-3
"""Of what a row gets from others; the limit for outputs in bfloat16 is 3e-2."""


class Shares(nn.Module):
    def __init__(self, share: Callable[[Tensor], Tensor], turns_autocast_on: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.share, self.turns_autocast_on = share, turns_autocast_on

    def forward(self, x: Tensor) -> Tensor:
        on = torch.autocast("cpu", torch.bfloat16, enabled=self.turns_autocast_on)
        with on if self.turns_autocast_on else contextlib.nullcontext():
            hidden = self.first(x).relu()
            return self.last(hidden + self.share(hidden))


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@contextlib.contextmanager
def products_in_bfloat16() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def train(
    model: nn.Module,
    of_input: Callable[[Tensor], Tensor],
    lower: Callable[[], AbstractContextManager[object]] = autocast,
) -> str:
    """What is said of a training in a lower precision."""
    with sharding(), contextlib.redirect_stderr(io.StringIO()) as said:
        for x, y in batches(3):
            with lower():
                loss = nn.functional.cross_entropy(model(of_input(x)), y)
            loss.backward()
    return said.getvalue()


def row_before(x: Tensor) -> Tensor:
    return SHARE * x.roll(1, 0)


def median(x: Tensor) -> Tensor:
    return SHARE * x.median(0).values


def running_sum(x: Tensor) -> Tensor:
    return SHARE * x.cumsum(0) / len(x)


@pytest.mark.parametrize("lower", [autocast, products_in_bfloat16])
@pytest.mark.parametrize("share", [row_before, median, running_sum])
@ranks(2)
def test_a_small_share_of_other_rows_is_seen(
    share: Callable[[Tensor], Tensor], lower: Callable[[], AbstractContextManager[object]]
) -> None:
    said = train(Shares(share), Tensor.float, lower)
    assert modules.call_counts.sharded == 0
    assert "Shares whole: its output" in said or torch.distributed.get_rank()


@pytest.mark.parametrize("of_input", [Tensor.float, Tensor.bfloat16])
@pytest.mark.parametrize("turns_autocast_on", [False, True])
@ranks(2)
def test_rows_of_their_own_are_divided(
    of_input: Callable[[Tensor], Tensor], turns_autocast_on: bool
) -> None:
    train(Shares(torch.zeros_like, turns_autocast_on), of_input)
    assert modules.call_counts.sharded > 0


class RoundsGradients(torch.autograd.Function):
    """Gradients as deep nets with batch normalisation over few numbers have them in float32, where
    another shape rounds otherwise; here they are set apart by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        ctx.dtypes = dtypes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + (grad.dtype in ctx.dtypes) / len(grad)), None


@pytest.mark.parametrize(
    ("dtypes", "is_whole"),
    [((torch.float32,), False), ((torch.float32, torch.float64), True)],
    ids=["rounding", "wrong in float64, too"],
)
@ranks(2)
def test_gradients_that_are_another_roundings_in_float32_are_compared_in_float64(
    dtypes: tuple[torch.dtype, ...], is_whole: bool
) -> None:
    model = Shares(lambda hidden: RoundsGradients.apply(hidden, dtypes))
    model.register_buffer("scale", torch.ones(1))
    tensors = [*model.parameters(), *model.buffers()]
    said = train(model, Tensor.float, contextlib.nullcontext)
    assert (modules.call_counts.sharded == 0) == is_whole
    assert ("its gradients are not those" in said) == (is_whole and instep.rank == 0)
    assert all(map(operator.is_, tensors, [*model.parameters(), *model.buffers()]))
    assert {each.dtype for each in tensors} == {torch.float32} == {torch.get_default_dtype()}


def rounded_by_shape(x: Tensor) -> Tensor:
    """What rounding would do where another algorithm is chosen for a part of the batch, on a
    processor that computes so; here it is set apart by hand."""
    in_fewer_bits = torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    return x * (SHARE / len(x)) if in_fewer_bits else torch.zeros_like(x)


@ranks(2)
def test_products_in_fewer_bits_round_as_half_precision_does() -> None:
    said = train(Shares(rounded_by_shape), Tensor.float, products_in_bfloat16)
    assert (modules.call_counts.sharded > 0, said) == (True, "")
    assert torch.get_float32_matmul_precision() == "highest"


SETTINGS = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"))
MKLDNN = (("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def settings_of_float32() -> list[object]:
    older: list[object] = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        try:
            older.append(read())
        except RuntimeError:  # PyTorch finds older and newer settings mixed
            older.append("mixed")
    return [fp32_precision(*key) for key in (*SETTINGS, *MKLDNN)] + older


@pytest.mark.parametrize("key", [("older", "high"), ("older", "medium"), *SETTINGS, *MKLDNN])
def test_no_setting_of_float32_stays_on_and_all_are_restored(key: tuple[str, str]) -> None:
    before = fp32_precision(*SETTINGS[0]), fp32_precision("cuda", "matmul")
    is_older = key[0] == "older"
    default = None if is_older else fp32_precision(*key)
    if is_older:
        torch.set_float32_matmul_precision(key[1])
    else:
        set_fp32_precision(*key, "bf16" if key[0] == "mkldnn" else "tf32")
    try:
        seen = settings_of_float32()
        with full_float32():
            assert {fp32_precision(*each) for each in (*SETTINGS, *MKLDNN)} == {"ieee"}
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
        assert settings_of_float32() == seen
        if not is_older and key != SETTINGS[0]:  # what follows another setting still does
            set_fp32_precision("generic", "all", "ieee")
            assert fp32_precision("mkldnn", "rnn") == ("bf16" if key == MKLDNN[0] else "ieee")
    finally:
        set_fp32_precision("generic", "all", before[0])
        torch.set_float32_matmul_precision("highest")
        set_fp32_precision("cuda", "matmul", before[1])
        set_fp32_precision("mkldnn", "matmul", "none")
        if default is not None:
            set_fp32_precision(*key, default)


def small_maps() -> nn.Module:
    """Batch normalisation over few numbers, which enlarges what half precision rounds."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Unflatten(1, (6, 1, 1)), nn.Upsample(8), nn.Conv2d(6, 8, 3)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


@ranks(2)
def test_where_half_precision_rounds_much_what_holds_in_full_precision_holds() -> None:
    said = train(small_maps(), Tensor.float)
    assert (modules.call_counts.sharded > 0, modules.call_counts.whole, said) == (True, 0, "")


def test_what_is_cast_without_gradients_is_not_used_in_the_next_call() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(), autocast_cache_off():
            model(x)
        model(x).sum().backward()
    assert model.weight.grad is not None
