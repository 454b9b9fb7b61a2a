"""Kernels of optimizers in an unedited script: the fused ones where it leaves them to PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from instep.process.patching import PatchHandle
from instep.unedited.optimizer_steps import fused_kernels
from instep.unedited.optimizer_steps.fused_kernels import adam
from instep.unedited.patch_table import OPTIMIZER_PATCHES

OPEN = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.99), "eps": 1e-6}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.1, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
]
DECIDED = [
    *({name: value} for name in ("foreach", "fused") for value in (True, False)),
    {"lr": torch.tensor(1e-3)},
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which fused kernels have run, with the replacement installed."""
    calls: list[str] = []
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
        original = getattr(torch, name)

        def kernel(*args, name=name, original=original, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, kernel)
    monkeypatch.setattr(fused_kernels, "_FEWEST_ELEMENTS", 1)
    with PatchHandle(OPTIMIZER_PATCHES):
        yield calls


def train(kind, options, model: nn.Module, steps: int = 5) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **options})
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def small_model(**options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 17, 3), nn.Linear(33, 5), nn.BatchNorm1d(5))
    return model.to(**options)


@pytest.mark.parametrize(("kind", "options"), OPEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_kernel_has_the_numbers_of_the_loops(kernels, kind, options, dtype) -> None:
    model, plain = small_model(dtype=dtype), small_model(dtype=dtype)
    optimizer = train(kind, options, model)
    assert len(kernels) == 5
    reference = train(kind, {**options, "foreach": False}, plain)
    assert len(kernels) == 5
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)
        assert mine._version >= 5
        for name, value in reference.state[theirs].items():
            atol = 1e-7 if name == "momentum_buffer" else 1e-8
            assert torch.allclose(optimizer.state[mine][name], value, rtol=1e-6, atol=atol)
            assert optimizer.state[mine][name]._version >= 5
    del reference.param_groups[0]["params"], optimizer.param_groups[0]["params"]
    assert optimizer.param_groups[0] == {**reference.param_groups[0], "foreach": None}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("options", DECIDED)
def test_a_script_that_chooses_gets_what_it_chose(kernels, kind, options) -> None:
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    train(kind, {**momentum, **options}, small_model())
    assert bool(kernels) == (options.get("fused") is True)


def test_capturable_is_for_accelerators_as_ever(kernels) -> None:
    with pytest.raises(AssertionError, match="capturable"):
        train(torch.optim.Adam, {"capturable": True}, small_model())
    assert not kernels


def test_sgd_without_momentum_has_no_need_of_a_kernel(kernels) -> None:
    train(torch.optim.SGD, {"weight_decay": 0.1}, small_model())
    assert not kernels


@pytest.mark.parametrize("width", [16, 256])
def test_a_small_model_of_sgd_has_its_loops(kernels, monkeypatch, width) -> None:
    monkeypatch.setattr(fused_kernels, "_FEWEST_ELEMENTS", 256 * 256)
    train(torch.optim.SGD, {"momentum": 0.9}, nn.Linear(width, 256))
    assert len(kernels) == (5 if width == 256 else 0)


def test_a_parameter_that_gets_its_first_gradient_later_is_left_to_the_loops(kernels) -> None:
    models = [small_model(), small_model()]
    ways = ({}, {"foreach": False})
    optimizers = []
    for model, options in zip(models, ways, strict=True):
        optimizers.append(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **options))
    torch.manual_seed(1)
    for number in range(4):
        for index, parameters in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            gradient = torch.randn_like(parameters[0])
            for parameter in parameters:
                parameter.grad = gradient.clone() if number > 1 or index > 0 else None
        for optimizer in optimizers:
            optimizer.step()
    assert kernels == ["_fused_sgd_"] * 3
    for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("option", "is_fused"),
    [({}, True), ({"differentiable": True}, False), ({"found_inf": torch.zeros(())}, False)],
)
def test_so_does_one_that_calls_the_function_of_a_step(option, is_fused) -> None:
    given = []
    tensors = [torch.ones(3)]
    adam(
        lambda *lists, **options: given.append(options),
        *([tensors] * 4), [], [torch.ones(())],
        **{"foreach": None, "fused": None, "lr": 0.1, **option},
    )  # fmt: skip
    assert given == [{"foreach": None, "fused": is_fused or None, "lr": 0.1, **option}]


def test_what_the_kernel_would_read_wrongly_is_left_to_the_loops(kernels) -> None:
    model = small_model(memory_format=torch.channels_last)
    train(torch.optim.Adam, {}, model)
    assert len(kernels) == 5  # parameters and gradients have the same strides
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    part = nn.ParameterList([nn.Parameter(torch.randn(4, 6)[:, ::2])])
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})):
        kind(model.parameters(), **options).step()
        train(kind, options, small_model(dtype=torch.bfloat16))
        train(kind, options, part)
    assert len(kernels) == 5


def test_a_graph_from_before_a_step_is_an_error_as_ever(kernels) -> None:
    model = nn.Linear(3, 3)
    loss = (model(torch.randn(2, 3, requires_grad=True)) @ model.weight).sum()
    train(torch.optim.AdamW, {}, model, steps=1)
    assert kernels == ["_fused_adamw_"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
