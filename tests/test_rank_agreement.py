"""What ranks decide from their own attributes, files and clocks, they decide together."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import instep
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan.module_state import attribute_changes
from pool import ranks
from sharded_training import sharding

pytestmark = pytest.mark.slow


class Watched(nn.Linear):
    """Has attributes of many kinds; its rows depend on each other once `couples` is set."""

    couples = False
    speed = ""
    seconds = 0

    def forward(self, input):  # noqa: A002  (torch's name)
        y = super().forward(input)
        return y.cumsum(0) if self.couples else y


@ranks(3)
@pytest.mark.parametrize("first", [1, 2, 7])
def test_what_changes_by_the_clock_of_each_rank_is_not_looked_at(first):
    model, x = Watched(4, 3), torch.randn(6, 4)
    with sharding():
        for call in range(30):
            if call >= first:
                model.speed = f"{call * (instep.rank + 3)} it/s"
                model.seconds = (call + instep.rank) // 3
            torch.testing.assert_close(model(x), x @ model.weight.T + model.bias)
        assert modules.call_counts.sharded == 30
        ignored = attribute_changes.changes_of(model)._ignored
        assert {name for _, _, name in ignored} == {"speed", "seconds"}
        model.couples = True
        torch.testing.assert_close(model(x), (x @ model.weight.T + model.bias).cumsum(0))
        assert modules.call_counts.whole == 1


@ranks(2)
def test_a_flag_of_one_rank_alone_is_no_reason_for_a_comparison():
    model, x = Watched(4, 3), torch.randn(6, 4)
    with sharding():
        for call in range(8):
            model.is_logging = call == 3 and instep.rank == 1
            model(x)
    assert modules.call_counts.sharded == 8


_logger = logging.getLogger("test")


class Logs(nn.Linear):
    calls = 0

    def forward(self, input):  # noqa: A002  (torch's name)
        self.calls += 1
        if self.calls == 5:
            _logger.debug("calls: %d", self.calls)  # remembers what it asks its parents
        return super().forward(input)


@ranks(2)
def test_a_logger_is_no_attribute_and_keys_need_no_order():
    model, x = Logs(4, 3), torch.randn(6, 4)
    model.scales = {0: 1.0, "last": 1.0, None: 1.0}
    with sharding():
        for call in range(8):
            model.scales[0] = model.scales["last"] = float(call)
            model(x)
    assert modules.call_counts.sharded == 8


class PrintsOnOneRank(nn.Linear):
    rank = 0
    most = 6

    def forward(self, input):  # noqa: A002  (torch's name)
        if instep.rank == self.rank and len(input) <= self.most:
            print("seen")
        return super().forward(input)


@ranks(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("most", [6, 2])  # for the whole batch, or for the rows of a rank only
def test_what_one_rank_alone_does_in_its_forward_keeps_all_of_them_whole(rank, at_first, most):
    model, x = PrintsOnOneRank(4, 3), torch.randn(6, 4)
    model.most = most
    with sharding() as log:
        model.rank = rank if at_first else None
        model(x)
        model.rank = rank
        for _ in range(4):
            torch.testing.assert_close(model(x), x @ model.weight.T + model.bias)
    assert modules.call_counts.sharded == (0 if at_first else 1)
    assert instep.rank or "its forward prints" in log.getvalue()


def block(size):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = []

        def forward(self, x):
            return x * size

    return Block()


def test_classes_of_one_name_are_looked_at_in_the_order_of_the_modules():
    parts = [block(size) for size in range(20)]
    changes = attribute_changes.AttributeChanges(nn.Sequential(*parts))
    classes = [items.where["forward"] for items in changes._items if items.key[0] == "Block"]
    assert classes == [type(part).forward for part in parts]


@ranks(2)
def test_models_that_lead_back_to_themselves_are_freed_once_others_are_trained():
    found = []
    with sharding():
        for _ in range(12):
            model = Watched(4, 3)
            model.call = model.forward
            for _ in range(5):
                model(torch.randn(6, 4)).sum().backward()
            found.append(weakref.ref(model))
        gc.collect()
        alive = [each() is not None for each in found]
        assert sum(alive) < 9, alive


@ranks(2)
def test_a_module_that_was_forgotten_is_compared_once_more():
    model, x = Watched(4, 3), torch.randn(6, 4)
    with sharding():
        model(x)
        for _ in range(2):  # the second one is begun when the first is known
            other = Watched(4, 3)
            for _ in range(20):
                other(x)
        assert attribute_changes.changes_of(model) is None
        model.couples = True
        torch.testing.assert_close(model(x), (x @ model.weight.T + model.bias).cumsum(0))
        assert modules.call_counts.whole == 1


@ranks(2)
def test_arguments_that_become_different_are_found_though_no_parameter_is():
    model, x = Watched(4, 3), torch.randn(6, 4)
    with sharding() as log:
        for call in range(1, 33):
            model(x + (call > 17) * instep.rank)
    assert modules.call_counts.sharded == 31
    if instep.rank == 0:
        assert "arguments that are not the same on rank 1 as on rank 0" in log.getvalue()
        assert "(calls 11 to 31 were divided)" in log.getvalue()
