"""The parts of a comparison of sharded and whole calls, one by one: changes, distances, owners."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from instep.unedited.sharded_call.compare.graph_difference import (
    find_change,
    find_difference,
    has_changed,
)
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.compare.tolerances import Tolerances
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import candidate_divisions, size_differences
from instep.unedited.sharded_call.plan.module_state import attribute_changes
from instep.unedited.sharded_call.plan.module_state.attribute_changes import (
    MAX_VALUES,
    AttributeChanges,
)
from instep.unedited.sharded_call.plan.module_state.module_properties import find_hooks, parts_of
from instep.unedited.sharded_call.plan.module_state.object_graph import ObjectGraph


class Keeps(nn.Module):
    """Holds plain values, and tensors in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0.0
        self.mode = "begin"
        self.weight = nn.Parameter(torch.ones(2))
        self.decayed = [self.weight]
        self.kept: dict[str, torch.Tensor] = {}


def graph(module: nn.Module, **values: Any) -> ObjectGraph:
    """The object graph with these values."""
    for name, value in values.items():
        setattr(module, name, value)
    return ObjectGraph({"": module})


@pytest.mark.parametrize(
    ("before", "expected", "actual", "same"),
    [
        (999.0, 1000.0, 1000.05, True),  # 1e-3 of a tenth of the sum
        (999.0, 1000.0, 1000.5, False),
        (-1000.5, 1.0, 1.5, True),  # 1e-3 of the change
        (-1000.5, 1.0, 2.5, False),
        (None, 1000.0, 1000.5, True),  # there was none before
        (None, 1000.0, 1001.5, False),
        (float("inf"), 1000.0, 1000.5, True),
        (999.0, 1000.0, 1001.0, False),  # a count
    ],
)
def test_a_number_may_differ_by_rounding_of_its_change(
    before: float | None, expected: float, actual: float, same: bool
) -> None:
    module = Keeps()
    first = graph(module, total=before)
    difference = find_difference(
        graph(module, total=actual), graph(module, total=expected), first, 1e-3
    )
    assert difference == (None if same else "its attribute total depends on the rows")


def test_a_tensor_is_found_that_a_forward_keeps_beside_its_parameters() -> None:
    module = Keeps()
    before = graph(module)
    assert find_change(before, graph(module), [module]) is None
    module.kept["last"] = torch.ones(2)
    change = find_change(before, graph(module), [module])
    assert change is not None
    assert change.startswith("its forward keeps tensors in kept")


def test_a_hook_that_a_forward_registers_or_removes_is_a_change_and_is_set_back() -> None:
    module = nn.Linear(2, 2)
    tables = {name: value for name, value in vars(module).items() if name.endswith("_hooks")}
    without = graph(module)
    assert not has_changed(without, graph(module))
    hook = module.register_forward_hook(lambda *_: None)
    with_hook = graph(module)
    assert has_changed(without, with_hook)
    assert find_difference(with_hook, without, without, 1e-3) is not None
    without.restore()
    assert not module._forward_hooks
    assert not has_changed(without, graph(module))
    with_hook.restore()
    assert [*module._forward_hooks] == [hook.id]
    hook.remove()
    assert has_changed(with_hook, graph(module))
    module._forward_hooks = OrderedDict()
    with_other_table = graph(module)
    assert has_changed(without, with_other_table)
    module.register_forward_hook(lambda *_: None)
    with_other_table.restore()
    assert not module._forward_hooks
    without.restore()
    assert all(getattr(module, name) is table for name, table in tables.items())


def test_a_proxy_of_a_module_is_looked_at_as_a_module_is() -> None:
    module = nn.Linear(2, 2)
    without = ObjectGraph({"": weakref.proxy(module)})
    module.register_forward_hook(lambda *_: None)
    without.restore()
    assert not module._forward_hooks


def test_the_attributes_of_a_module_are_named_by_its_path_of_now() -> None:
    module = nn.Linear(2, 2)
    for path in ("", "encoder", "decoder"):
        nodes = ObjectGraph({path: module}).nodes
        name = f"{path}._forward_hooks".removeprefix(".")
        assert nodes[id(module._forward_hooks)].path == name


def test_a_buffer_is_as_far_from_another_as_its_own_norm_says() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("seen", torch.tensor([0.3, 0.4]))
    module.running_var = torch.tensor([9.0, 16.0])
    call = BoundCall.of(nn.Module.__call__, [module], (), {})
    expected = Snapshot(call)
    module.seen += torch.tensor([0.0, 0.1])
    module.running_mean += torch.tensor([0.0, 0.1])  # beside a mean of zero
    errors = Snapshot(call).buffer_errors(expected)
    assert errors[0, "seen"] == pytest.approx((0.2, 0.2))
    assert errors[0, "running_mean"].to_spread == pytest.approx(0.02)


@pytest.mark.parametrize(("error", "is_allowed"), [(0.05, True), (0.3, False)])
def test_by_the_noise_of_one_gradient_another_may_differ_by_a_tenth(
    error: float, is_allowed: bool
) -> None:
    reference: Any = types.SimpleNamespace(gradient_errors=lambda _: [error, 0.0])
    tolerances, noise = Tolerances(reference), types.SimpleNamespace(gradients=[0.0, 0.5])
    assert not tolerances.matches_gradients([torch.ones(2)])
    tolerances._noise = noise
    assert tolerances.matches_gradients([torch.ones(2)]) == is_allowed


def test_a_flag_with_too_many_values_is_a_number() -> None:
    module = Keeps()
    changes = AttributeChanges(module)
    for k in range(MAX_VALUES):
        module.mode = f"{k}"
        changes.update()
        assert [value for _, value in changes.flags] == [f"{k}"]
    assert changes.due == 0
    module.mode = "one more"
    changes.update()
    assert (changes.flags, changes.due) == (frozenset(), 1)
    for k in range(100):
        module.mode = f"step {k}"
        changes.update()
    assert changes.flags == frozenset()
    (values,) = changes._values.values()
    assert len(values) == MAX_VALUES + 1


def test_a_flag_with_its_first_value_tells_no_calls_apart() -> None:
    module = nn.Dropout()
    changes = AttributeChanges(module)
    for training in (False, True, False, True):
        module.train(training)
        changes.update()
        assert changes.flags == (frozenset() if training else {(("", 0, "training"), False)})


def test_a_flag_that_changes_together_with_an_object_is_seen() -> None:
    module = Keeps()
    module.settings = types.SimpleNamespace(rate=1)
    changes = AttributeChanges(module)
    module.mode = "other"
    module.settings = types.SimpleNamespace(rate=1)
    changes.update()
    assert changes.flags == {(("", 0, "mode"), "other")}


def test_each_of_the_first_changes_of_a_number_calls_for_a_comparison() -> None:
    module = Keeps()
    changes = AttributeChanges(module)
    for k in range(1, attribute_changes.FEW_CHANGES + 1):
        module.total = 0.5 * k
        changes.update()
        assert (changes.due, changes.flags) == (k, frozenset())


def test_what_is_known_of_a_module_stays_known() -> None:
    module = Keeps()
    changes = attribute_changes.begin(module)
    assert attribute_changes.begin(module) is changes
    assert attribute_changes.changes_of(module) is changes


def test_beside_a_square_sequence_with_its_batch_in_dimension_1_labels_are_divided() -> None:
    sequence, labels = torch.ones(4, 4, 3), torch.ones(4)
    found = [(each.dims, each.batch_dim) for each in candidate_divisions([sequence, labels], 2)]
    assert found == [((0, 0), 0), ((1, 0), 1)]


def test_a_square_mask_that_has_as_many_rows_as_the_batch_may_go_to_every_rank_whole() -> None:
    batch, mask = torch.ones(4, 4, 3), torch.ones(4, 4)
    found = [(each.dims, each.batch_dim) for each in candidate_divisions([batch, mask], 2)]
    assert found == [((0, 0), 0), ((0, None), 0), ((1, 1), 1), ((1, None), 1)]
    assert [each.dims for each in candidate_divisions([mask], 2)] == [(0,), (1,)]


@pytest.mark.parametrize("offsets", [[0, 2, 5], [0, 4, 2]])
def test_numbers_that_decrease_are_no_offsets(offsets: list[int]) -> None:
    leaves = [torch.arange(6), torch.tensor(offsets)]
    found = [each.offsets for each in candidate_divisions(leaves, 2)]
    assert (1 in found) == (offsets == sorted(offsets))


def test_fewer_rows_than_asked_for_are_not_divided() -> None:
    assert not [*candidate_divisions([torch.ones(2, 1)], 3)]


def test_shards_with_as_many_numbers_may_differ_in_their_longest_entry() -> None:
    lengths = [1, 3, 2, 2]
    assert size_differences([[torch.ones(k) for k in lengths]], 4, 2) == {(0, 0, "longest")}


def test_parts_come_in_the_order_of_modules_each_once() -> None:
    shared = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))
    model = nn.Sequential(nn.Sequential(nn.Tanh(), shared), shared[1], shared, nn.ModuleDict())
    model.register_module("none", None)
    shared.add_module("model", model)  # it holds itself
    assert [*parts_of(model)] == list(model.modules())


def function_of_a_library() -> types.FunctionType:
    names: dict[str, Any] = {"__name__": "some_library"}
    text = "def calls(function, *args):\n    function(*args)\n"
    exec(compile(text, "/usr/lib/site-packages/some_library.py", "exec"), names)
    calls: types.FunctionType = names["calls"]
    return calls


def test_a_librarys_hook_that_calls_a_function_of_the_script_is_the_scripts() -> None:
    def of_script(*args: Any) -> None:
        """Called by the hook."""

    calls = function_of_a_library()
    module = nn.Linear(2, 2)
    hook = module.register_forward_hook(calls)
    assert find_hooks(module, parts_of(module)) == ("", (hook.id,))
    hook.remove()
    module.register_forward_hook(functools.partial(calls, of_script))
    assert find_hooks(module, parts_of(module))[0].startswith("the script has a hook on its Linear")


def test_a_hook_made_of_a_partial_is_named_after_its_functions_library() -> None:
    module = nn.Linear(2, 2)
    partial = functools.partial(functools.partial(function_of_a_library(), "a"), 1)
    module.register_full_backward_hook(partial)
    why, _ = find_hooks(module, parts_of(module))
    assert why.startswith("some_library has a hook on its Linear")
