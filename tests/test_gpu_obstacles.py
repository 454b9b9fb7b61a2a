"""What only happens on a GPU, as far as it can be tried without one; test_gpu.py needs one."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import instep
from instep.errors import CapturedStepError, ShardedCallError
from instep.training import replicas
from instep.training.blocks import Block
from instep.training.draws.kernels import DrawMode
from instep.unedited.sharded_call import modules, outermost_call
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.module_state import module_properties
from instep.unedited.sharded_call.plan.sharding_plan import Draw
from instep.unedited.sharded_call.run.random_numbers import GlobalBatchDraws, _RandomCall
from instep.verify.recording import changes, recorder
from pool import ranks, run
from sharded_training import sharding

pytestmark = pytest.mark.slow


def compiled(mode: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of what inductor imports
        return torch.compile(nn.Linear(4, 3), mode=mode)


@ranks(2)
def test_what_a_trial_would_change_on_a_gpu_is_computed_whole_at_once() -> None:
    """The dropout of cuDNN's recurrent layers and compiled CUDA graphs have state of their own."""
    rnn = nn.LSTM(4, 3, 2, dropout=0.5)
    for model, why in (
        (nn.Sequential(rnn), "cuDNN draws the dropout of its LSTM"),
        (compiled("reduce-overhead"), "CUDA graphs, whose next run"),
    ):
        with pytest.MonkeyPatch.context() as patch, sharding() as log:
            patch.setattr(module_properties, "_is_on_gpu", lambda part: True)
            patch.setattr(outermost_call, "find_plan", None)  # no trial
            with torch.compiler.set_stance("force_eager"):
                model(torch.randn(6, 4))
                model(torch.randn(6, 4))
            assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 2)
            assert (why in log.getvalue()) == (instep.rank == 0)


@pytest.mark.parametrize(
    "module",
    [nn.LSTM(4, 3, 2, dropout=0.5).eval(), nn.LSTM(4, 3, 2), nn.LSTM(4, 3), nn.Linear(4, 3)],
)
def test_other_modules_are_tried_on_a_gpu(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_properties, "_is_on_gpu", lambda part: True)
    assert module_properties.find_gpu_state([module, compiled("default")]) == ""


def test_recurrent_layers_without_cudnn_are_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_properties, "_is_on_gpu", lambda part: True)
    layers = [nn.GRU(4, 3, 2, dropout=0.5)]
    assert "GRU" in module_properties.find_gpu_state(layers)
    with torch.backends.cudnn.flags(enabled=False):
        assert module_properties.find_gpu_state(layers) == ""


@ranks(2)
def test_a_call_that_a_graph_captures_is_whole_though_others_are_divided() -> None:
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    with sharding() as log, pytest.MonkeyPatch.context() as patch:
        model(x)
        patch.setattr(outermost_call, "is_capturing_graph", lambda: True)
        model(x)
        patch.undo()
        model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 1)
    assert ("a CUDA graph captures it" in log.getvalue()) == (instep.rank == 0)


def test_a_captured_step_of_a_replica_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = instep.replicate(nn.Linear(4, 3)), torch.randn(6, 4)
    monkeypatch.setattr(replicas, "is_capturing_graph", lambda: True)
    with pytest.raises(CapturedStepError, match="forward of the replicated Linear in training"):
        model(x)
    assert model.eval()(x).shape == (6, 3)
    monkeypatch.undo()
    assert model.train()(x).shape == (6, 3)


def test_attention_that_draws_in_a_kernel_of_a_gpu_is_told_by_name() -> None:
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    anything: Any = None
    draws = GlobalBatchDraws([Block(0, 2, 6)], 0, anything, anything, anything)
    draw = Draw(0, "_scaled_dot_product_efficient_attention", 4)
    call = _RandomCall(op, (torch.ones(3, 2, 4, 4),), {"dropout_p": 0.5}, draw, ())
    with pytest.raises(ShardedCallError, match=r"_scaled_dot_product_efficient.*SDPBackend.MATH"):
        draws.run(call)


# ------------------------------------------------------------------------- memory of a trial


class Held:
    """Lives as long as the graph of a forward."""


alive: weakref.WeakSet[Held] = weakref.WeakSet()
at_start: list[int] = []
"""How many were alive when each forward began."""


def note(held: Held) -> None:
    at_start.append(len(alive))
    alive.add(held)


vars(sys).update(note_graph=note)  # a trial sets back what a forward names


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Counting(nn.Linear):
    def __init__(self, *, couples: bool = False, has_loss: bool = False) -> None:
        super().__init__(4, 3)
        self.couples, self.has_loss = couples, has_loss

    def forward(self, x: Tensor) -> Any:
        sys.note_graph(held := Held())  # type: ignore[attr-defined]
        y = F.dropout(Holding.apply(super().forward(x), held), 0.5)
        y = y.cumsum(0) if self.couples else y
        return (y.square().mean(), y) if self.has_loss else y


def counted(model: nn.Module, x: Tensor) -> tuple[Any, Tensor, list[int]]:
    """What a call returns, what is drawn after it, and the graphs alive at each forward of it."""
    alive.clear()
    at_start.clear()
    torch.manual_seed(0)
    return model(x), torch.rand(2), list(at_start)


@pytest.mark.parametrize(
    ("has_loss", "on_accelerator", "expected"),
    [
        # The whole forward, the one that tells what is drawn, that of this rank's rows, and two
        # with each other values: of all rows, and twice of the first and the last one.
        (False, False, [0, 1, 1, *[2] * 6]),
        (False, True, [0, 0, 0, *[1] * 6]),
        (True, False, [0, 1, 1, 2, 3, *[2] * 6]),
        (True, True, [0, 0, 0, *[1] * 8]),  # beside that of this rank's rows
    ],
)
def test_on_an_accelerator_a_trial_begins_without_the_graph_of_the_whole_forward(
    has_loss: bool, on_accelerator: bool, expected: list[int]
) -> None:
    assert run(2, graphs_of_a_trial, has_loss, on_accelerator) == [expected] * 2


def graphs_of_a_trial(has_loss: bool, on_accelerator: bool) -> list[int]:
    model, x = Counting(has_loss=has_loss), torch.randn(6, 4)
    whole, drawn, _ = counted(model, x)
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCall, "is_on_accelerator", on_accelerator)
        found, drawn_then, seen = counted(model, x)
    assert modules.call_counts.sharded == 1
    torch.testing.assert_close(found, whole)
    assert torch.equal(drawn_then, drawn)
    return seen


class UsesOlder(nn.Linear):
    """Uses what was computed from a parameter before the call."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = [self.weight.square().sum()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale[0]


@ranks(2)
def test_what_was_computed_before_a_call_is_not_released_with_its_graph() -> None:
    model = UsesOlder()
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCall, "is_on_accelerator", True)
        model(torch.randn(6, 4)).sum().backward()
    assert model.weight.grad is not None


class Adding(Counting):
    """Adds what was computed from its argument or its parameter before the call."""

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return super().forward(x) + other


@pytest.mark.parametrize("couples", [False, True])
@pytest.mark.parametrize("of_parameter", [False, True])
def test_on_an_accelerator_an_argument_keeps_the_graph_by_which_it_was_computed(
    couples: bool, of_parameter: bool
) -> None:
    # The trial with other values is beside the graph of this rank's rows.
    expected = {0} if couples else {0, 1}
    assert run(2, graphs_before_a_call, couples, of_parameter) == [expected] * 2


def graphs_before_a_call(couples: bool, of_parameter: bool) -> set[int]:
    """How many graphs of a trial were alive at each forward of it."""
    model, before = Adding(couples=couples), nn.Linear(5, 4)
    given = torch.randn(6, 5)

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        x = before(given).sin()
        other = model.weight.square().sum(1) if of_parameter else x[:, :3].square()
        y = model(x, other.expand(6, 3))
        return list(torch.autograd.grad(y.square().sum(), [*before.parameters(), model.weight]))

    whole = gradients()
    alive.clear()
    at_start.clear()
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCall, "is_on_accelerator", True)
        found = gradients()
    assert (modules.call_counts.sharded > 1) != couples
    torch.testing.assert_close(found, whole)
    return set(at_start)


@ranks(2)
def test_on_an_accelerator_a_whole_call_gives_what_one_forward_would() -> None:
    model, x = Counting(couples=True), torch.randn(6, 4)
    whole, drawn, _ = counted(model, x)
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundCall, "is_on_accelerator", True)
        found, drawn_then, seen = counted(model, x)
        found.sum().backward()
    assert modules.call_counts.whole == 1
    assert torch.equal(found, whole)
    assert torch.equal(drawn_then, drawn)
    assert set(seen) == {0}
    assert model.weight.grad is not None


# ------------------------------------------------------------------------------------ verify


def test_a_pinned_state_has_each_tensor_on_the_device_where_it_was() -> None:
    """`step` is on the GPU for fused and capturable optimizers, else on the CPU."""
    now = {"step": torch.ones((), device="meta"), "exp_avg": torch.ones(2), "best": 1}
    saved = {"step": torch.ones(()), "exp_avg": torch.ones(2), "best": 2, "new": [torch.ones(1)]}
    placed = changes._on_devices_of(now, saved, torch.device("meta"))
    assert placed["step"].is_meta
    assert placed["exp_avg"].device.type == "cpu"
    assert placed["best"] == 2
    assert placed["new"][0].is_meta


def test_steps_that_a_graph_captures_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values are not there yet."""
    monkeypatch.setattr(recorder, "is_capturing_graph", lambda: True)
    watching = recorder.Recorder.__new__(recorder.Recorder)
    watching._depth, watching._stopped = 0, False
    optimizer: Any = None  # nothing is read of it
    assert watching._before_step(optimizer, (), {}) is None
    watching._after_step(optimizer, (), {})
    assert watching._depth == 0


def test_what_is_compiled_runs_so_while_draws_are_intercepted_and_after() -> None:
    """Uncompiled, its dropout draws other numbers than inductor's."""
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Tensor) -> Any:
            runs.append(torch._C._len_torch_dispatch_stack())
            return graph(*args)

        return run

    double = torch.compile(lambda x: x * 2, backend=backend)
    with DrawMode(lambda func, args, kwargs: func(*args, **kwargs)):
        double(torch.ones(3))
    double(torch.ones(3))
    assert runs == [1, 0]


class CoupledRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(0))


@ranks(2)
def test_no_parts_are_looked_for_inside_of_what_is_compiled() -> None:
    model = torch.compile(nn.Sequential(CoupledRows(4, 4), nn.Linear(4, 3)), backend="eager")
    with pytest.MonkeyPatch.context() as patch, sharding():
        patch.setattr(outermost_call, "_run_by_parts", None)
        for _ in range(3):
            model(torch.randn(6, 4)).sum().backward()
        assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 3)
