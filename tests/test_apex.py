"""`from apex import amp`: the scenarios of Apex's own tests, and those that it lacks."""

import copy
import importlib
from contextlib import contextmanager, redirect_stderr
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn import functional

import instep
from instep.compat.apex import amp
from instep.compat.apex.amp import amp as functions
from instep.compat.apex.parallel import LARC, DistributedDataParallel
from instep.precision import PrecisionError
from instep.training.amp import casting
from pool import ranks

pytestmark = pytest.mark.slow

HALF, FULL = torch.float16, torch.float32


@contextmanager
def fresh_amp():
    """Nothing of amp's is left behind in this process."""
    try:
        yield
    finally:
        casting.stop_casting()
        for name in ("mixed", "is_disabled", "opt_properties", "loss_scalers", "handle"):
            vars(amp._amp_state).pop(name, None)


@pytest.fixture(autouse=True)
def _fresh_amp():
    with fresh_amp():
        yield


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


FLOAT16 = {
    "O0": {},
    "O1": {"patch_torch_functions_type": HALF},
    "O2": {"cast_model_type": HALF},
    "O3": {"cast_model_type": HALF},
}
"""The options that ask for float16 on a CPU."""


def prepared(opt_level="O1", saved=None, **options):
    """In float16; the states of model and optimizer in `saved` are loaded before."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for each, state in zip((model, optimizer), saved or (), strict=False):
        each.load_state_dict(state)
    options = {"verbosity": 0, "max_loss_scale": 256.0} | FLOAT16[opt_level] | options
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


def step(model, optimizer, x, factor=1.0):
    optimizer.zero_grad()
    with amp.scale_loss(model(x).square().mean() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


# --------------------------------------------------------------- test_basic_casts, test_promotion

MATRICES = {
    "linear": lambda x: functional.linear(x, torch.ones(3, 4)),
    "matmul": lambda x: x @ torch.ones(4, 3),
    "bmm": lambda x: torch.bmm(x[None], torch.ones(1, 4, 3)),
    "conv1d": lambda x: functional.conv1d(x[:, None], torch.ones(1, 1, 3)),
    "addmm": lambda x: torch.addmm(torch.zeros(2, 3), x, torch.ones(4, 3)),
}
LOSSES = {
    "mse": lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.tensor([0, 1])),
    "l1": lambda x: functional.l1_loss(x, torch.zeros_like(x)),
    "bce": lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_what_multiplies_matrices_is_half_and_its_gradient_as_its_input(name, given):
    prepared("O1")
    x = torch.randn(2, 4).to(given).requires_grad_()
    y = MATRICES[name](x)
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype) == (HALF, given)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_losses_are_float32_and_their_gradient_as_their_input(name, given):
    prepared("O1")
    x = torch.randn(2, 4).to(given).requires_grad_()
    y = LOSSES[name](x)
    y.backward()
    assert (y.dtype, x.grad.dtype) == (FULL, given)


WIDE = {
    "softmax": lambda x: functional.softmax(x, 1),
    "softmax of a module": nn.Softmax(1),
    "group_norm": nn.GroupNorm(2, 4),
    "layer_norm": nn.LayerNorm(4),
    "sum": lambda x: x.sum(1),
    "pow": lambda x: x**2,
    "exp": lambda x: torch.exp(x),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_what_loses_digits_in_half_precision_is_float32_and_its_gradient_as_its_input(name, given):
    prepared("O1")
    x = torch.randn(2, 4).to(given).requires_grad_()
    y = WIDE[name](x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (FULL, given)
    with amp.disable_casts():
        assert torch.exp(x).dtype is given


RECURRENT = {
    "RNN": lambda: nn.RNN(4, 4, 2, nonlinearity="relu"),
    "GRU": lambda: nn.GRU(4, 4, 2, bidirectional=True),
    "LSTM": lambda: nn.LSTM(4, 4, 2),
    "RNNCell": lambda: nn.RNNCell(4, 4),
    "GRUCell": lambda: nn.GRUCell(4, 4),
    "LSTMCell": lambda: nn.LSTMCell(4, 4),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("half", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_recurrent_layers_and_cells_are_half_and_their_gradients_as_inputs(kind, half, given):
    torch.manual_seed(0)
    model = RECURRENT[kind]()
    x = torch.randn(3, 2, 4)[slice(None) if kind in ("RNN", "GRU", "LSTM") else 0]
    expected = outputs_of(model(x))
    expected.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    amp.initialize(model, opt_level="O1", patch_torch_functions_type=half, verbosity=0)
    x = x.to(given).requires_grad_()
    model.zero_grad()
    y = outputs_of(model(x))
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype) == (half, given)
    torch.testing.assert_close(y.float(), expected, rtol=0.03, atol=0.03)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0.03, atol=0.1)


def outputs_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_what_goes_to_the_cpu_is_float32(given):
    prepared("O1")
    x = torch.randn(2, 4).to(given).requires_grad_()
    y = x.cpu()
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (FULL, given)
    assert torch.arange(2).cpu().dtype is torch.int64
    with amp.disable_casts():
        assert x.cpu().dtype is given


def test_binary_cross_entropy_refuses_half_precision_unless_allowed():
    p, target = torch.rand(2, 4), torch.ones(2, 4)
    prepared("O1")
    functional.binary_cross_entropy(p, target)
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        functional.binary_cross_entropy(p.to(HALF), target)
    handle = amp.init(allow_banned=True)
    assert functional.binary_cross_entropy(p.to(HALF), target).dtype is FULL
    handle._deactivate()


@pytest.mark.parametrize("function", [functional.relu, torch.tanh, lambda x: x.view(-1)])
@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_the_rest_is_as_its_input(function, given):
    prepared("O1")
    assert function(torch.randn(2, 4).to(given)).dtype is given


def test_mixed_arguments_are_promoted_and_in_place_keeps_its_own():
    prepared("O1")
    half, full = torch.ones(3, dtype=HALF), torch.ones(3)
    for function in (torch.add, torch.mul, torch.atan2, lambda a, b: torch.cat([a, b])):
        assert function(half, full).dtype is FULL
        assert function(full, half).dtype is FULL
        assert function(half, half).dtype is HALF
    assert half.add_(full).dtype is HALF
    assert full.mul_(half).dtype is FULL


def test_the_users_own_functions_are_cast_as_they_say():
    def dtypes(*values, last):
        return [v.dtype for v in (*values, last)]

    class Library:
        one = staticmethod(dtypes)
        two = staticmethod(dtypes)
        three = staticmethod(dtypes)

    amp.register_half_function(Library, "one")
    amp.register_float_function(Library, "two")
    amp.register_promote_function(Library, "three")
    half, full = torch.ones(1, dtype=HALF), torch.ones(1)
    decorated = [
        amp.half_function(dtypes),
        amp.float_function(dtypes),
        amp.promote_function(dtypes),
    ]
    assert [f(half, last=full) for f in decorated] == [[HALF, FULL]] * 3
    assert Library.one(half, last=full) == [HALF, FULL]
    prepared("O1")
    for one, two, three in (decorated, (Library.one, Library.two, Library.three)):
        assert one(full, last=full) == [HALF, HALF]
        assert two(half, last=half) == [FULL, FULL]
        assert three(half, last=full) == [FULL, FULL]
        assert three(half, last=half) == [HALF, HALF]
    with amp.disable_casts():
        assert decorated[0](full, last=full) == [FULL, FULL]
        assert functional.linear(full, full[None]).dtype is FULL
    with pytest.raises(ValueError, match="has no function 'four'"):
        amp.register_half_function(Library, "four")


# ----------------------------------------------------------------------------- test_cache


@pytest.mark.parametrize("between", [False, True], ids=["train", "train-eval-train"])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_a_weight_that_is_used_twice_and_stepped_is_never_stale(opt_level, between):
    class Promoting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[2.0]]))

        def forward(self, x):
            return functional.linear(x, self.weight) + functional.linear(2 * x, self.weight)

    model = Promoting()
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, loss_scale=4.0, verbosity=0
    )
    expected = 2.0
    for _ in range(3):
        if between:
            with torch.no_grad():
                assert model(torch.ones(1, 1)).item() == 3 * expected
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        expected -= 0.25 * 3
        assert model.weight.item() == expected


# ------------------------------------------------------------------------ test_checkpointing


@pytest.mark.parametrize("first", ["initialize", "load"])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_a_run_restored_from_its_states_goes_on_bit_by_bit(opt_level, first):
    batches = torch.randn(6, 8, 4)
    model, optimizer = prepared(opt_level, loss_scale="dynamic")
    for x in batches[:3]:
        step(model, optimizer, x)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    assert {t.dtype for t in saved[0].values()} == {FULL, torch.int64}
    for x in batches[3:]:
        step(model, optimizer, x)
    expected = copy.deepcopy(model.state_dict())
    if first == "initialize":
        model, optimizer = prepared(opt_level, loss_scale="dynamic")
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    else:
        model, optimizer = prepared(opt_level, saved=saved, loss_scale="dynamic")
    amp.load_state_dict(saved[2])
    for x in batches[3:]:
        step(model, optimizer, x)
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 6}}


@pytest.mark.parametrize("num_losses", [1, 3])
def test_each_scale_is_halved_by_its_own_overflows(num_losses):
    model, optimizer = prepared("O1", num_losses=num_losses, max_loss_scale=2.0**24)
    for loss_id in range(num_losses):
        for _ in range(loss_id + 1):
            loss = model(torch.ones(2, 4)).sum() * float("inf")
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    assert amp.state_dict() == {
        f"loss_scaler{k}": {"loss_scale": 2.0 ** (15 - k), "unskipped": 0}
        for k in range(num_losses)
    }


def test_a_state_of_other_losses_is_loaded_as_far_as_it_goes(capsys):
    prepared("O1", num_losses=3)
    state = amp.state_dict()
    state["loss_scaler0"] = {"loss_scale": 64.0, "unskipped": 7}
    prepared("O1", num_losses=1)
    amp.load_state_dict(state)
    assert "3 loss scales saved, 1 losses here" in capsys.readouterr().out
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 7}}
    with pytest.raises(RuntimeError, match="holds model, which are no loss scales"):
        amp.load_state_dict({"model": {}})


def test_half_weights_are_saved_in_float32_and_loaded_into_any_level():
    model, optimizer = prepared("O2")
    step(model, optimizer, torch.randn(8, 4))
    saved = copy.deepcopy(model.state_dict())
    plain = small_model(1)
    plain.load_state_dict(saved)
    x = torch.randn(5, 4)
    torch.testing.assert_close(plain.eval()(x), model.eval()(x), rtol=1e-2, atol=1e-2)


# --------------------------------------------------------- test_multiple_models_optimizers_losses


def test_what_comes_back_has_the_shape_of_what_was_given():
    def one():
        model = small_model()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    (a, x), (b, y) = one(), one()
    assert amp.initialize(a, x, verbosity=0) == (a, x)
    assert amp.initialize([b], [y], verbosity=0) == ([b], [y])
    (a, x), (b, y) = one(), one()
    assert amp.initialize([a, b], [x, y], opt_level="O2", verbosity=0) == ([a, b], [x, y])
    (a, x), (b, y) = one(), one()
    assert amp.initialize(a, [x], verbosity=0) == (a, [x])
    assert amp.initialize([b], y, verbosity=0) == ([b], y)
    a, b = small_model(), small_model()
    assert amp.initialize(a, verbosity=0) is a
    assert amp.initialize([b], verbosity=0) == [b]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_two_losses_of_one_optimizer_are_one_step(opt_level, bad):
    """Which is skipped if either overflows."""
    reference = small_model().eval()
    model, optimizer = prepared(opt_level, num_losses=2, loss_scale="dynamic")
    model.eval()
    plain = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    x = torch.randn(2, 6, 4)
    for k in range(2):
        reference(x[k]).square().mean().backward()
        loss = model(x[k]).square().mean() * (float("inf") if k == bad else 1)
        with amp.scale_loss(loss, optimizer, loss_id=k) as scaled_loss:
            scaled_loss.backward()
    if bad is None:
        plain.step()
    optimizer.step()
    for ours, theirs in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


# ------------------------------------------------------------------- test_larc, add_param_group


def larc_step(parameter, lr, decay, trust, clip, eps=1e-8):
    """The formula of the paper, for SGD without momentum."""
    size, slope = parameter.norm(), parameter.grad.norm()
    local = trust * size / (slope + decay * size + eps)
    rate = min(local, lr) if clip else local * lr
    return parameter - rate * (parameter.grad + decay * parameter)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc_takes_the_papers_step(clip, decay):
    model = small_model()
    optimizer = LARC(torch.optim.SGD(model.parameters(), 0.5, weight_decay=decay), 0.02, clip)
    model(torch.randn(8, 4)).square().sum().backward()
    with torch.no_grad():
        model[0].bias.zero_()  # of no size: stepped with the group's rate
        expected = [
            larc_step(p, 0.5, decay, 0.02, clip) if p.norm() > 0 else p - 0.5 * p.grad
            for p in model.parameters()
        ]
    optimizer.step()
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay]
    assert optimizer.state_dict() == optimizer.optim.state_dict()


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_larc_trains_at_every_level(opt_level):
    model = small_model()
    optimizer = LARC(torch.optim.SGD(model.parameters(), 1.0))
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, loss_scale=8.0, verbosity=0
    )
    x = torch.randn(16, 4)
    first = model(x).square().mean().item()
    for _ in range(20):
        step(model, optimizer, x)
    assert model(x).square().mean().item() < 0.8 * first


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_a_group_added_before_or_after_the_first_step_is_trained(opt_level):
    ends = []
    for late in (False, True):
        model = small_model().eval()
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=opt_level, loss_scale=8.0, verbosity=0
        )
        x = torch.ones(4, 4)
        for k in range(3):
            if k == late:
                optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.1})
            step(model, optimizer, x)
        ends.append(model[3].weight.detach().clone())
        assert not torch.equal(ends[-1], small_model()[3].weight.to(ends[-1].dtype))
    assert not torch.equal(*ends)


# ------------------------------------------------------------- half precision on a CPU, the state


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_on_a_cpu_half_precision_is_bfloat16_unless_float16_is_asked_for(opt_level, capsys):
    def dtype_of_output(**options):
        with fresh_amp():
            model = amp.initialize(small_model(), opt_level=opt_level, verbosity=0, **options)
            return model[0](torch.ones(2, 4).to(model[0].weight.dtype)).dtype

    functions._say_bfloat16.cache_clear()
    assert dtype_of_output() is torch.bfloat16
    assert dtype_of_output() is torch.bfloat16
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("amp computes in bfloat16 here") == 1
    assert captured.err.count("\n") == 1
    functions._say_bfloat16.cache_clear()
    for half in (HALF, torch.bfloat16):
        (name,) = FLOAT16[opt_level]
        assert dtype_of_output(**{name: half}) is half
    amp.initialize(small_model(), opt_level="O0", verbosity=0)
    amp.initialize(small_model(), opt_level="O1", patch_torch_functions=False, verbosity=0)
    assert capsys.readouterr().err == ""


@ranks(2)
def test_one_rank_says_that_it_is_bfloat16():
    functions._say_bfloat16.cache_clear()
    with fresh_amp(), redirect_stderr(StringIO()) as said:
        amp.initialize(small_model(), verbosity=0)
    assert said.getvalue().count("bfloat16") == (instep.rank == 0)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_in_bfloat16_too_a_step_that_overflows_is_skipped(opt_level):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    before = copy.deepcopy(list(model.parameters()))
    step(model, optimizer, torch.ones(2, 4), float("inf"))
    assert all(map(torch.equal, model.parameters(), before))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0}}


def test_the_state_is_what_initialize_has_set():
    state = amp._amp_state
    assert importlib.import_module("instep.compat.apex.amp._amp_state") is state
    assert not any(hasattr(state, n) for n in ("opt_properties", "loss_scalers", "handle"))
    assert (state.hard_override, state.allow_incoming_model_not_fp32) == (False, False)
    model, optimizer = prepared("O2", num_losses=2, loss_scale="dynamic")
    assert (state.verbosity, state.max_loss_scale, state.min_loss_scale) == (0, 256.0, None)
    assert state.opt_properties.master_weights
    with pytest.raises(AttributeError, match="amp has no option 'spam'; it has enabled, opt_level"):
        _ = state.opt_properties.spam
    assert state.opt_properties.options == {
        "enabled": True,
        "opt_level": "O2",
        "cast_model_type": HALF,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    }
    with pytest.raises(AttributeError, match="no option 'speed'"):
        _ = state.opt_properties.speed
    assert [scaler.loss_scale() for scaler in state.loss_scalers] == [256.0, 256.0]
    first = state.loss_scalers[0]
    step(model, optimizer, torch.ones(2, 4), float("inf"))
    assert (first.loss_scale(), first._unskipped, first._has_overflow) == (128.0, 0, True)
    assert (first._overflow_buf.tolist(), first.dynamic) == ([1], True)
    assert not state.loss_scalers[1]._has_overflow
    with pytest.raises(PrecisionError, match="hard_override cannot be set"):
        state.hard_override = True
    state.hard_override = False
    amp.initialize(small_model(), enabled=False)
    assert not state.opt_properties.enabled


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_model_with_parameters_in_half_precision_is_taken_where_the_state_allows_it(opt_level):
    model = small_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PrecisionError, match="starts from a model in"):
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    try:
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    finally:
        amp._amp_state.allow_incoming_model_not_fp32 = False
    before = copy.deepcopy(list(model.parameters()))
    step(model, optimizer, torch.ones(2, 4))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not all(map(torch.equal, model.parameters(), before))


def test_a_function_of_float32_is_refused_in_place_of_half_precision():
    half = torch.ones(2, dtype=torch.bfloat16)
    half.exp_()
    handle = amp.init()
    try:
        with pytest.raises(NotImplementedError, match="not in place of a tensor in half"):
            half.exp_()
        assert torch.ones(2).exp_().dtype is torch.float32
    finally:
        handle._deactivate()


def test_what_is_written_to_a_scaler_counts_from_the_next_step():
    model, optimizer = prepared("O2", loss_scale="dynamic", max_loss_scale=2.0**24)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._unskipped, scaler._scale_seq_len = 64.0, 3, 4
    scaler._max_loss_scale, scaler._min_loss_scale = 100.0, 80.0
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}}
    step(model, optimizer, torch.ones(2, 4))
    assert (scaler.loss_scale(), scaler._unskipped) == (100.0, 0)
    step(model, optimizer, torch.ones(2, 4), float("inf"))
    assert (scaler._loss_scale, scaler._max_loss_scale, scaler._min_loss_scale) == (80, 100, 80)


def test_init_casts_functions_until_its_handle_is_deactivated():
    x = torch.randn(2, 4)
    handle = amp.init()
    assert amp._amp_state.handle is handle
    assert handle.is_active()
    assert functional.linear(x, torch.ones(3, 4)).dtype is torch.bfloat16
    with handle._disable_casts():
        assert not handle.is_active()
        assert functional.linear(x, torch.ones(3, 4)).dtype is FULL
    for call in (lambda: handle.scale_loss(x, None), lambda: handle.wrap_optimizer(None)):
        with pytest.raises(RuntimeError, match=r"amp\.scale_loss\(loss, optimizer\)"):
            call()
    handle._deactivate()
    assert not handle.is_active()
    assert functional.linear(x, torch.ones(3, 4)).dtype is FULL
    disabled = amp.init(enabled=False)
    assert not disabled.is_active()
    assert functional.linear(x, torch.ones(3, 4)).dtype is FULL
    with disabled.scale_loss(x, None) as scaled:
        assert scaled is x


# ------------------------------------------------------------------------ words and mistakes


def test_it_says_what_it_does_once(capsys):
    model, optimizer = prepared("O2", verbosity=1, loss_scale="dynamic")
    said = capsys.readouterr().out
    assert said.startswith("amp: Options(opt_level='O2', cast_model_type=torch.float16")
    step(model, optimizer, torch.ones(2, 4), float("inf"))
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 128.0\n"
    )


def test_disabled_it_does_nothing():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = model(torch.ones(2, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert {p.dtype for p in model.parameters()} == {FULL}


def test_mistakes_are_named():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(RuntimeError, match=r"initialize.* must come before"),
        amp.scale_loss(torch.ones(()), optimizer),
    ):
        pass
    with pytest.raises(RuntimeError, match="unknown level 'O4'"):
        amp.initialize(model, optimizer, opt_level="O4")
    with pytest.raises(RuntimeError, match="contradicts level O1"):
        amp.initialize(model, optimizer, opt_level="O1", keep_batchnorm_fp32="True")
    with pytest.raises(RuntimeError, match=r"_type=torch.float16 contradicts"):
        amp.initialize(model, optimizer, opt_level="O2", patch_torch_functions_type=HALF)
    with pytest.raises(RuntimeError, match=r"torch.float16 or torch.bfloat16, not torch.float32"):
        amp.initialize(model, optimizer, patch_torch_functions_type=FULL)
    with pytest.raises(TypeError, match="models is a module or a list of modules, not tuple"):
        amp.initialize((model,), optimizer)
    with pytest.raises(TypeError, match=r"optimizers is an optimizer or a list.* not dict"):
        amp.initialize(model, {})
    with pytest.raises(RuntimeError, match=r"already in apex.parallel.DistributedDataParallel"):
        amp.initialize(DistributedDataParallel(small_model()), verbosity=0)
    with pytest.raises(RuntimeError, match=r"float16.*Leave out"):
        amp.initialize(small_model().half())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(PrecisionError, match="this model is set already"):
        amp.initialize(model, torch.optim.SGD(small_model().parameters(), 0.1))
    with pytest.raises(PrecisionError, match="this optimizer is set already"):
        amp.initialize(small_model(), optimizer)
    with pytest.raises(PrecisionError, match="closure"):
        optimizer.step(closure=lambda: 0.0)


# ------------------------------------------------------------------------ amp_master_params


@ranks(1, 2, 3)
def test_masters_are_equal_on_all_ranks_and_round_to_the_model():
    with fresh_amp():
        model, optimizer = prepared("O2", loss_scale="dynamic")
        model = DistributedDataParallel(model)
        torch.manual_seed(instep.rank)
        for k in range(4):
            overflows = k == 2 and instep.rank == instep.world_size - 1
            step(model, optimizer, torch.randn(5, 4), float("inf") if overflows else 1.0)
        masters = list(amp.master_params(optimizer))
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(parameter, master.to(parameter.dtype))
            assert torch.equal(master, instep.broadcast(master))
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 1}}


@ranks(2, 3)
def test_accumulation_by_delay_unscale_is_the_averaged_sum():
    with fresh_amp():
        for opt_level in ("O1", "O2"):
            reference = small_model().eval()
            model, optimizer = prepared(opt_level, loss_scale=16.0)
            model = DistributedDataParallel(model.eval())
            torch.manual_seed(0)
            x = torch.randn(2, instep.world_size, 5, 4)
            for k in range(2):
                sum(reference(x[k, r]).square().mean() for r in range(instep.world_size)).div(
                    instep.world_size
                ).backward()
            model.disable_allreduce()
            loss = model(x[0, instep.rank]).square().mean()
            with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
                scaled_loss.backward()
            model.enable_allreduce()
            loss = model(x[1, instep.rank]).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            masters = amp.master_params(optimizer)
            for ours, theirs in zip(masters, reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=2e-3)


@ranks(2, 3)
def test_pytorchs_ddp_after_amp_keeps_masters_in_step():
    """It broadcasts into the half-precision parameters, which the masters must follow."""
    with fresh_amp():
        for opt_level in ("O1", "O2"):
            model = small_model(seed=instep.rank)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=opt_level, max_loss_scale=256.0, verbosity=0
            )
            model = nn.parallel.DistributedDataParallel(model)
            x = torch.randn(instep.world_size, 5, 4, generator=torch.Generator().manual_seed(0))
            for k in range(3):
                overflows = k == 1 and instep.rank == 1
                step(model, optimizer, x[instep.rank], float("inf") if overflows else 1.0)
            for master in amp.master_params(optimizer):
                assert torch.equal(master, instep.broadcast(master))
            assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 1}}


@ranks(1, 2, 3)
def test_all_ranks_begin_with_the_digits_of_rank_0():
    """instep's broadcasts tell them at once, the first backward after PyTorch's does."""
    wrappers = (instep.replicate, DistributedDataParallel, nn.parallel.DistributedDataParallel)
    for wrap in wrappers[: 3 if instep.world_size > 1 else 2]:
        with fresh_amp():
            model = small_model(seed=instep.rank)
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            model, optimizer = amp.initialize(
                model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0
            )
            model = wrap(model)
            if wrap is nn.parallel.DistributedDataParallel:
                step(model, optimizer, torch.ones(5, 4))
            expected = small_model(seed=0).parameters()
            for master, initial in zip(amp.master_params(optimizer), expected, strict=True):
                assert torch.equal(master, initial)


@ranks(1, 3)
@pytest.mark.parametrize("delay", [False, True])
def test_sparse_gradients_of_a_table_are_averaged_too(delay):
    torch.manual_seed(0)
    table = nn.Embedding(5, 2, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(4, 1))
    alone = copy.deepcopy(model)
    for rank in range(instep.world_size):
        (alone(torch.tensor([[rank, rank + 1]])).sum() / instep.world_size).backward()
    averaged = DistributedDataParallel(model, delay_allreduce=delay)
    averaged(torch.tensor([[instep.rank, instep.rank + 1]])).sum().backward()
    assert table.weight.grad.is_sparse
    assert torch.allclose(table.weight.grad.to_dense(), alone[0].weight.grad.to_dense())
    assert torch.allclose(model[2].weight.grad, alone[2].weight.grad)


@ranks(1, 3)
def test_a_table_that_a_dense_layer_has_too_is_averaged_as_that():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 5, bias=False))
    model[1].weight = model[0].weight
    alone = copy.deepcopy(model)
    for rank in range(instep.world_size):
        (alone(torch.tensor([rank, 4])).square().sum() / instep.world_size).backward()
    averaged = DistributedDataParallel(model)
    averaged(torch.tensor([instep.rank, 4])).square().sum().backward()
    assert not model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
