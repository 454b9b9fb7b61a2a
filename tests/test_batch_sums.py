"""Sums that a forward computes itself, over the rows of all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.process.torch_private.dispatch import script_operations
from instep.unedited.sharded_call.shards.batch_sums import (
    RowSums,
    over_all_rows,
    replaced_sums,
)
from instep.unedited.sharded_call.shards.reductions import Place, noted_lengths


def twice(part: Tensor) -> Tensor:
    """As if another rank had the same rows."""
    return part * 2


def test_sums_over_rows_go_over_all_ranks_and_others_do_not() -> None:
    x = torch.arange(6.0).view(3, 2)
    with replaced_sums(over_all_rows(twice, RowSums())):
        found = [x.sum(), x.sum(0), torch.sum(x, dim=-2), x.sum((0, 1), keepdim=True)]
        same = [x.sum(1), x.sum(-1), x[0, 0].sum(), torch.mean(x, 1), x.mean(), x.mean(dim=0)]
    expected = [x.sum(), x.sum(0), x.sum(0), x.sum((0, 1), keepdim=True)]
    torch.testing.assert_close(found, [2 * each for each in expected])
    plain = [x.sum(1), x.sum(-1), x[0, 0].sum(), x.mean(1), x.mean(), x.mean(0)]
    torch.testing.assert_close(same, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_mean_has_its_dtype_and_no_overflow(dtype: torch.dtype) -> None:
    x = torch.full((4096,), 100, dtype=dtype)
    with replaced_sums(over_all_rows(twice, RowSums())):
        means = [x.mean(), x.mean(dtype=torch.float64)]
    assert [(mean.item(), mean.dtype) for mean in means] == [(100, dtype), (100, torch.float64)]


def test_a_mean_over_no_rows_of_this_rank_is_that_of_the_others() -> None:
    with replaced_sums(over_all_rows(lambda part: part + 2, RowSums())):
        assert torch.ones(0).mean().item() == 1


def test_libraries_and_other_threads_are_left_alone_and_all_is_put_back() -> None:
    before = torch.sum, torch.mean, vars(Tensor).get("sum")
    noted: dict[Place, set[int]] = {}
    x = torch.ones(3)
    library: dict[str, Any] = {"__name__": "torch.nn.functional"}
    exec("def add_up(x): return x.sum()", library)
    with noted_lengths(noted, {}):
        library["add_up"](x)
        thread = threading.Thread(target=lambda: x.sum())
        thread.start()
        thread.join()
        assert not noted
        x.sum()
    x.sum()
    assert [*noted.values()] == [{3}]
    assert before == (torch.sum, torch.mean, vars(Tensor).get("sum"))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_forward_may_compile_a_function_that_adds_up() -> None:
    def add_up(x: Tensor) -> Tensor:
        return torch.sum(x) + torch.mean(x)

    known = dict(script_operations)
    with noted_lengths({}, {}):
        compiled = torch.jit.script(add_up)
    assert compiled(torch.ones(3)) == 4
    assert script_operations == known


def test_what_is_as_long_as_in_the_whole_forward_has_no_rows() -> None:
    def forward(x: Tensor) -> list[Tensor]:
        """A sum of rows, one of features, and one of either."""
        return [x.sum(), x.mean(0).sum(), *(each.sum() for each in (x, x[0]))]

    noted: dict[Place, set[int]] = {}
    x = torch.arange(12.0).view(4, 3)
    with noted_lengths(noted, {}):
        whole = forward(x)
    lengths = {tuple(sorted(each)) for each in noted.values()}
    assert lengths == {(4,), (3,), (3, 4)}
    trial = RowSums(noted)
    with replaced_sums(over_all_rows(twice, trial)):
        found = forward(x[:2])
    rows = x[:2]
    expected = [2 * rows.sum(), rows.mean(0).sum(), 2 * rows.sum(), rows[0].sum()]
    torch.testing.assert_close(found, expected)
    assert len(whole) == len(found)
    assert trial.without_rows is None  # of one place some had rows
    one = {place: each for place, each in noted.items() if each == {3}}
    known = RowSums(None, one)
    assert known.without_rows == frozenset(one)
    with replaced_sums(over_all_rows(twice, known)):
        torch.testing.assert_close(forward(x[:2])[:2], expected[:2])
