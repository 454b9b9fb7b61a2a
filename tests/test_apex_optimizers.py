"""Apex's optimizers, normalisation and fp16_utils against their formulas and PyTorch's own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import instep
from instep.compat.apex import amp, fp16_utils
from instep.compat.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from instep.compat.apex.normalization.fused_layer_norm import fused_layer_norm
from instep.compat.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from pool import ranks

pytestmark = pytest.mark.slow

STEPS = 5


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shapes = ((3, 4), (4,), (2, 2))
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def gradients(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=dtype) * 3 for p in parameters()]


def train(make, dtype=torch.float64):
    """The parameters after some steps; the second group begins with the third parameter."""
    trained = parameters(dtype)
    optimizer = make([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.05}])
    for step in range(STEPS):
        for parameter, grad in zip(trained, gradients(step, dtype), strict=True):
            parameter.grad = grad
        optimizer.step()
    return trained


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (
            lambda p: FusedAdam(p, 0.1, weight_decay=0.1),
            lambda p: optim.AdamW(p, 0.1, weight_decay=0.1),
        ),
        (
            lambda p: FusedAdam(p, 0.1, True, (0.5, 0.9), 1e-3, False, weight_decay=0.1),
            lambda p: optim.Adam(p, 0.1, (0.5, 0.9), 1e-3, weight_decay=0.1),
        ),
        (
            lambda p: FusedSGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
            lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        ),
        (lambda p: FusedSGD(p, 0.1), lambda p: optim.SGD(p, 0.1)),
        (
            lambda p: FusedAdagrad(p, 0.1, weight_decay=0.1),
            lambda p: optim.Adagrad(p, 0.1, weight_decay=0.1),
        ),
    ],
    ids=["AdamW", "Adam", "nesterov", "SGD", "Adagrad"],
)
def test_what_pytorch_has_is_pytorchs(ours, torchs) -> None:
    for a, b in zip(train(ours), train(torchs), strict=True):
        torch.testing.assert_close(a, b)


def lamb(decay, *, nvlamb=False, averaging=True, correction=True, decoupled=True, most=1.0):
    """The formula, number by number."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    values = [p.detach().flatten().tolist() for p in parameters()]
    m = [[0.0] * len(v) for v in values]
    s = [[0.0] * len(v) for v in values]
    for t in range(1, STEPS + 1):
        grads = [g.flatten().tolist() for g in gradients(t - 1)]
        norm = math.sqrt(sum(x * x for g in grads for x in g))
        for k, (v, g) in enumerate(zip(values, grads, strict=True)):
            lr = 0.1 if k < 2 else 0.05
            updates = []
            for i, x in enumerate(g):
                x = x / max(1.0, norm / most) + (0.0 if decoupled else decay * v[i])
                m[k][i] = beta1 * m[k][i] + (1 - beta1 if averaging else 1.0) * x
                s[k][i] = beta2 * s[k][i] + (1 - beta2) * x * x
                first = m[k][i] / (1 - beta1**t) if correction else m[k][i]
                second = s[k][i] / (1 - beta2**t) if correction else s[k][i]
                updates.append(
                    first / (math.sqrt(second) + eps) + (decay * v[i] if decoupled else 0.0)
                )
            ratio = 1.0
            if nvlamb or decay:
                ratio = math.sqrt(sum(x * x for x in v) / sum(x * x for x in updates))
            values[k] = [x - lr * ratio * u for x, u in zip(v, updates, strict=True)]
    return values


def check_values(trained, formula) -> None:
    """That the parameters have the numbers of a formula."""
    for parameter, expected in zip(trained, formula, strict=True):
        torch.testing.assert_close(
            parameter.detach().flatten(), torch.tensor(expected, dtype=torch.float64)
        )


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {"decay": 0.01}),
        ({"weight_decay": 0.0}, {"decay": 0.0}),
        ({"weight_decay": 0.0, "use_nvlamb": True}, {"decay": 0.0, "nvlamb": True}),
        ({"adam_w_mode": False}, {"decay": 0.01, "decoupled": False}),
        ({"grad_averaging": False}, {"decay": 0.01, "averaging": False}),
        ({"bias_correction": False}, {"decay": 0.01, "correction": False}),
        ({"max_grad_norm": 100.0}, {"decay": 0.01, "most": 100.0}),
    ],
)
def test_lamb_is_its_formula(options, formula) -> None:
    check_values(train(lambda p: FusedLAMB(p, 0.1, **options)), lamb(**formula))


def novograd(
    decay=0.0, *, inside=False, averaging=True, correction=True, largest=False, zero=False
):
    """The formula, number by number."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    values = [p.detach().flatten().tolist() for p in parameters()]
    m = [[0.0] * len(v) for v in values]
    norms = [0.0] * len(values)
    for t in range(1, STEPS + 1):
        for k, (v, grad) in enumerate(zip(values, gradients(t - 1), strict=True)):
            g = grad.flatten().tolist()
            norm = max(map(abs, g)) if largest else math.sqrt(sum(x * x for x in g))
            if t == 1 and not zero:
                norms[k] = norm
            if largest:
                norms[k] = beta2 * norms[k] + (1 - beta2) * norm
            else:
                norms[k] = math.sqrt(beta2 * norms[k] ** 2 + (1 - beta2) * norm**2)
            scale = norms[k] / (math.sqrt(1 - beta2**t) if correction else 1.0) + eps
            for i, x in enumerate(g):
                x = x / scale + decay * v[i] if inside else x
                m[k][i] = beta1 * m[k][i] + (1 - beta1 if averaging else 1.0) * x
                update = m[k][i] / (1 - beta1**t if correction else 1.0)
                update = update if inside else update / scale + decay * v[i]
                v[i] -= (0.1 if k < 2 else 0.05) * update
    return values


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, {}),
        ({"weight_decay": 0.1}, {"decay": 0.1}),
        ({"weight_decay": 0.1, "reg_inside_moment": True}, {"decay": 0.1, "inside": True}),
        ({"grad_averaging": False}, {"averaging": False}),
        ({"bias_correction": False}, {"correction": False}),
        ({"norm_type": 0}, {"largest": True}),
        ({"init_zero": True}, {"zero": True}),
    ],
)
def test_novograd_is_its_formula(options, formula) -> None:
    check_values(train(lambda p: FusedNovoGrad(p, 0.1, **options)), novograd(**formula))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_mixed_lamb_steps_float32_copies_of_half_precision_and_saves_them(half) -> None:
    torch.manual_seed(0)
    initial = torch.randn(40, 3)
    plain = torch.nn.Parameter(initial.to(half).float())
    mixed = torch.nn.Parameter(initial.to(half))
    reference = FusedLAMB([plain], 1e-4)
    tried = FusedMixedPrecisionLamb([mixed], 1e-4, reduced_precision_dtype=half)
    for number in range(6):
        if number == 3:
            state = copy.deepcopy(tried.state_dict())
            tried = FusedMixedPrecisionLamb([mixed], 1e-4, reduced_precision_dtype=half)
            tried.load_state_dict(state)
        mixed.grad = torch.randn(40, 3).to(half)
        plain.grad = mixed.grad.float()
        reference.step()
        tried.step()
        assert torch.equal(tried.state[mixed]["full_precision"], plain)
        assert torch.equal(mixed, plain.to(half))
    with torch.no_grad():
        mixed.fill_(2.0)
    tried.step()
    torch.testing.assert_close(mixed, torch.full_like(mixed, 2.0), rtol=0.0, atol=0.02)
    with pytest.raises(ValueError, match="has no grad_scaler="):
        tried.step(grad_scaler=torch.amp.GradScaler("cpu"))
    late = FusedMixedPrecisionLamb([plain], 1e-4, step=10)
    late.step()
    assert late.param_groups[0]["step"] == 11


@pytest.mark.parametrize("optimizer", [FusedLAMB, FusedNovoGrad])
def test_norms_of_large_tensors_are_exact(optimizer) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(5_000_001))
    parameter.grad = torch.rand(5_000_001)
    expected = parameter.grad.double().square().sum().sqrt()
    trained = optimizer([parameter], 1.0, weight_decay=0.0, bias_correction=False)
    trained.step()
    if optimizer is FusedNovoGrad:
        found = trained.state[parameter]["exp_avg_sq"]
    else:
        moment = trained.state[parameter]["exp_avg"]
        found = 0.1 * parameter.grad.sum(dtype=torch.float64) / moment.sum(dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


OPTIMIZERS = (FusedAdam, FusedSGD, FusedAdagrad, FusedLAMB, FusedNovoGrad)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_saved_state_goes_on_bit_for_bit(kind) -> None:
    trained, resumed = parameters(), parameters()
    optimizer = kind(trained, 0.1)
    for step in range(STEPS):
        if step == 2:
            with torch.no_grad():
                for a, b in zip(resumed, trained, strict=True):
                    a.copy_(b)
            other = kind(resumed, 0.1)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in (trained, resumed) if step >= 2 else (trained,):
            for parameter, grad in zip(group, gradients(step), strict=True):
                parameter.grad = grad
        optimizer.step()
        if step >= 2:
            other.step()
    assert all(map(torch.equal, trained, resumed))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("none", [True, False])
def test_zero_grad_does_what_the_constructor_said(kind, none) -> None:
    [parameter, *_] = parameters()
    optimizer = kind([parameter], 0.1, set_grad_none=none)
    for how, is_none in ((None, none), (True, True), (False, False)):
        parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(*([] if how is None else [how]))
        assert (parameter.grad is None) == is_none
        assert is_none or not parameter.grad.any()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda p: FusedAdam(p, bias_correction=False), ValueError, "bias_correction='False'"),
        (lambda p: FusedAdam(p, master_weights=True), ValueError, "no master_weights=True"),
        (lambda p: FusedAdam(p, amsgrad=True), RuntimeError, "AMSGrad"),
        (lambda p: FusedSGD(p, wd_after_momentum=True), ValueError, "no wd_after_momentum=True"),
        (lambda p: FusedAdagrad(p, adagrad_w_mode=True), ValueError, "no adagrad_w_mode=True"),
        (lambda p: FusedLAMB(p, amsgrad=True), RuntimeError, "AMSGrad"),
        (lambda p: FusedNovoGrad(p, amsgrad=True), RuntimeError, "FusedNovoGrad does .* AMSGrad"),
        (lambda p: FusedNovoGrad(p, norm_type=1), RuntimeError, "norms 2 and 0"),
        (lambda p: fp16_utils.FP16_Optimizer(p), RuntimeError, "amp.initialize"),
    ],
)
def test_what_there_is_no_counterpart_of_is_refused_by_its_name(make, error, said) -> None:
    with pytest.raises(error, match=said):
        make(parameters())


@ranks(2)
def test_a_divided_fused_adam_has_the_bits_of_the_undivided_one() -> None:
    torch.manual_seed(0)
    models = [instep.replicate(nn.Linear(9, 7)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, divided = (FusedAdam(model.parameters(), 0.1, weight_decay=0.1) for model in models)
    instep.shard(divided)
    for _ in range(3):
        x = instep.shard(torch.randn(6, 9, generator=torch.Generator().manual_seed(1)))
        for model, optimizer in zip(models, (plain, divided), strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_amp_keeps_master_weights_for_them() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = FusedLAMB(model.parameters(), 0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", cast_model_type=torch.bfloat16, verbosity=0
    )
    before = [p.clone() for p in amp.master_params(optimizer)]
    with amp.scale_loss(model(torch.randn(2, 4)).square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    masters = [*amp.master_params(optimizer)]
    assert {p.dtype for p in masters} == {torch.float32}
    assert not any(map(torch.equal, before, masters))


@pytest.mark.parametrize("shape", [5, (5,), (3, 5), torch.Size([3, 5])])
def test_normalisation_is_pytorchs(shape) -> None:
    x = torch.randn(2, 3, 5)
    wanted = [shape] if isinstance(shape, int) else list(shape)
    assert torch.equal(FusedLayerNorm(shape)(x), functional.layer_norm(x, wanted))
    assert torch.equal(fused_layer_norm(x, shape, 1e-5), functional.layer_norm(x, wanted))
    plain = FusedRMSNorm(shape, elementwise_affine=False)
    torch.testing.assert_close(plain(x), functional.rms_norm(x, wanted, eps=1e-5))
    assert plain.weight is None


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_normalisation_gives_the_dtype_of_its_weight(kind) -> None:
    norm = kind(5)
    assert norm(torch.randn(2, 5).bfloat16()).dtype is torch.float32
    assert norm.bfloat16()(torch.randn(2, 5)).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="elementwise_affine"):
        kind(5, elementwise_affine=False)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_normalisation_is_in_half_precision_under_autocast(kind, half) -> None:
    norm, x = kind(5), torch.randn(2, 5, requires_grad=True)
    with torch.autocast("cpu", half):
        found = norm(x)
        assert torch.is_autocast_enabled("cpu")
    found.sum().backward()
    assert (found.dtype, x.grad.dtype, norm.weight.grad.dtype) == (half, *[torch.float32] * 2)
    assert torch.equal(found, copy.deepcopy(norm).to(half)(x.to(half)))
    assert norm(x).dtype is torch.float32


@pytest.mark.parametrize("flat", [True, False])
def test_a_step_by_hand_in_half_precision(flat) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    if flat:
        model = model[0]
    oracle = copy.deepcopy(model)
    half = fp16_utils.network_to_half(model)
    assert half(torch.randn(2, 4)).dtype is torch.float16
    half.eval()
    own, masters = fp16_utils.prep_param_lists(half, flat_master=flat)
    optimizer = optim.SGD(masters, 0.1)
    plain = optim.SGD(oracle.parameters(), 0.1)
    for each, parameter in zip(own, oracle.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter).half().float()
        each.grad = parameter.grad.to(each.dtype)
    fp16_utils.model_grads_to_master_grads(own, masters, flat_master=flat)
    optimizer.step()
    plain.step()
    fp16_utils.master_params_to_model_params(own, masters, flat_master=flat)
    for each, parameter in zip(own, oracle.parameters(), strict=True):
        torch.testing.assert_close(each.float(), parameter, rtol=1e-3, atol=1e-3)
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == fp16_utils.to_python_float([2.5])


def test_a_model_in_half_precision_keeps_batch_normalisation_with_weights() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    model = fp16_utils.FP16Model(network)
    dtypes = [*(each.dtype for each in model.parameters()), network[2].running_mean.dtype]
    half, single = torch.float16, torch.float32
    assert dtypes == [half, half, single, single, half]
    assert network[2].num_batches_tracked.dtype is torch.int64
    assert model.eval()(torch.randn(2, 4)).dtype is half
    assert fp16_utils.convert_network(network, single) is network
    assert network[0].weight.dtype is single


def test_a_loss_scale_shrinks_on_overflow_and_grows_after_a_window() -> None:
    scaler = fp16_utils.DynamicLossScaler(init_scale=8.0, scale_window=2)
    weight = nn.Parameter(torch.ones(2))
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
        weight.grad = None
        scaler.backward((weight * factor).sum())
        overflow = scaler.has_overflow([weight])
        assert overflow or torch.equal(weight.grad, torch.full((2,), scaler.loss_scale))
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]
    constant = fp16_utils.LossScaler(4.0)
    constant.update_scale(constant.has_overflow([weight]))
    (scaled,) = constant.scale_gradient(nn.Identity(), (torch.ones(1),), ())
    assert (constant.loss_scale, scaled.item()) == (4.0, 4.0)
