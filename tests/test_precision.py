"""Levels, master weights and loss scales; ranks agree on a skipped step."""

import copy
import gc
import pickle
import runpy
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.precision import LossScaler, PrecisionError, prepare
from instep.training.amp import casting, levels
from oracle import same_as_one_process
from pool import ranks, run

pytestmark = pytest.mark.slow

HALF, FULL = torch.float16, torch.float32


@contextmanager
def nothing_cast_afterwards():
    try:
        yield
    finally:
        casting.stop_casting()


@pytest.fixture(autouse=True)
def _nothing_cast_afterwards():
    with nothing_cast_afterwards():
        yield


def small_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


# ------------------------------------------------------------------------------ the levels


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (FULL, False, None, False, 1.0)),
        ("O1", (None, True, None, None, "dynamic")),
        ("O2", (HALF, False, True, True, "dynamic")),
        ("O3", (HALF, False, False, False, 1.0)),
    ],
)
def test_the_levels_are_those_of_the_table(level, expected):
    options = levels.choose_options(level)
    assert (
        options.cast_model_type,
        options.patch_torch_functions,
        options.keep_batchnorm_fp32,
        options.master_weights,
        options.loss_scale,
    ) == expected


def test_overrides_are_read_from_strings_too():
    options = levels.choose_options("O3", keep_batchnorm_fp32="True", loss_scale="128.0")
    assert (options.keep_batchnorm_fp32, options.loss_scale) == (True, 128.0)
    assert levels.choose_options("O0", loss_scale="dynamic").loss_scale == "dynamic"
    assert levels.choose_options("O2", keep_batchnorm_fp32="False").keep_batchnorm_fp32 is False
    assert levels.choose_options("O2", torch.bfloat16).loss_scale == 1.0
    assert levels.choose_options("O1", cast_model_type=False) == levels.choose_options("O1")
    assert levels.choose_options("O2", cast_model_type=False).cast_model_type is None


@pytest.mark.parametrize(
    ("level", "overrides", "message"),
    [
        ("01", {}, "unknown level '01'; known are O0, O1, O2, O3.*letter O"),
        ("O1", {"loss_scaling": 1.0}, "unknown option 'loss_scaling'; known are .*, loss_scale"),
        ("O1", {"cast_model_type": HALF}, "contradicts level O1: its parameters stay in float32"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True contradicts level O1"),
        ("O1", {"master_weights": True}, "master_weights=True contradicts level O1"),
        ("O2", {"patch_torch_functions": True}, "contradicts level O2: only O1 casts functions"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, "True or False .* not 'yes'"),
        ("O2", {"loss_scale": "big"}, "loss_scale is \"dynamic\" or a number above 0, not 'big'"),
        ("O2", {"loss_scale": -1}, "a number above 0, not -1"),
        ("O2", {"cast_model_type": torch.int8}, "a floating-point torch.dtype, not torch.int8"),
    ],
)
def test_what_a_level_leaves_no_meaning_for_is_refused(level, overrides, message):
    with pytest.raises(PrecisionError, match=message):
        levels.choose_options(level, **overrides)


# ------------------------------------------------------------------------------- the scale


def test_a_dynamic_scale_doubles_after_2000_good_steps_and_halves_on_overflow():
    scaler = LossScaler("dynamic")
    assert scaler.scale == 2.0**16
    assert [scaler.update(False) for _ in range(1999)] == [False] * 1999
    assert scaler.scale == 2.0**16
    scaler.update(False)
    assert (scaler.scale, scaler.good) == (2.0**17, 0)
    for _ in range(1500):
        scaler.update(False)
    assert scaler.update(True)
    assert (scaler.scale, scaler.good) == (2.0**16, 0)


def test_a_dynamic_scale_has_a_floor_and_a_cap():
    scaler = LossScaler("dynamic", least=2.0**15, most=2.0**16)
    for _ in range(2000):
        scaler.update(False)
    assert scaler.scale == 2.0**16
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 2.0**15
    assert LossScaler("dynamic", most=8.0).scale == 8.0


def test_a_fixed_scale_neither_moves_nor_skips():
    scaler = LossScaler(128.0)
    assert not scaler.update(True)
    for _ in range(2001):
        scaler.update(False)
    assert scaler.scale == 128.0


# --------------------------------------------------------------------- what becomes of a model


def test_o2_casts_the_model_but_for_batch_normalisation_and_keeps_its_parameters():
    model = small_model()
    before = list(model.parameters())
    prepare(model, sgd(model), "O2")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert [p.dtype for p in model.parameters()] == [HALF, HALF, FULL, FULL, HALF, HALF]
    assert model[1].running_mean.dtype is FULL
    seen = {}
    model[0].register_forward_hook(lambda m, args, out: seen.update(x=args[0].dtype))
    assert model(torch.randn(2, 4)).dtype is FULL
    assert seen == {"x": HALF}
    assert {t.dtype for t in model.state_dict().values()} == {FULL, torch.int64}
    assert model[0].state_dict()["weight"].dtype is FULL


def test_o3_casts_batch_normalisation_too_and_outputs_as_asked():
    model = small_model()
    prepare(model, sgd(model), "O3", cast_model_outputs=HALF)
    assert {p.dtype for p in model.parameters()} == {HALF}
    assert model(torch.randn(2, 4)).dtype is HALF


def test_nested_inputs_of_any_kind_are_cast_and_what_does_not_float_is_left():
    class Batch:
        def __init__(self, x):
            self.x = x

        def to(self, dtype):
            return Batch(self.x.to(dtype))

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, pair, *, batch, ids, name):
            assert (pair[0]["x"].dtype, batch.x.dtype) == (HALF, HALF)
            assert (ids.dtype, name) == (torch.int64, "half")
            return {"y": self.w * pair[0]["x"]}, ids

    model = Reader()
    prepare(model, level="O3")
    output, ids = model(
        ({"x": torch.ones(2)},), batch=Batch(torch.ones(1)), ids=torch.ones(1).long(), name="half"
    )
    assert (output["y"].dtype, ids.dtype) == (FULL, torch.int64)


def test_a_prepared_model_copies_and_pickles():
    model = small_model()
    optimizer = sgd(model)
    prepare(model, optimizer, "O2")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
        assert {t.dtype for t in twin.state_dict().values()} == {FULL, torch.int64}
        assert twin(torch.randn(2, 4)).dtype is FULL


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_o1_casts_functions_everywhere_until_another_level_is_chosen(dtype):
    model = small_model()
    prepare(model, sgd(model), "O1", dtype=dtype)
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    assert linear(x, w).dtype is dtype
    assert model(x).dtype is dtype
    assert cross_entropy(model(x), torch.tensor([0, 1])).dtype is FULL
    with casting.no_cast():
        assert linear(x, w).dtype is FULL
    assert {p.dtype for p in model.parameters()} == {FULL}
    prepare(small_model(), level="O0")
    assert linear(x, w).dtype is FULL


def test_o1_computes_backward_in_the_dtypes_of_forward():
    model = small_model()
    prepare(model, sgd(model), "O1")
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            seen.append(casting.active_dtype())
            return grad

    Watch.apply(model(torch.randn(2, 4))).sum().backward()
    assert seen == [None]
    assert casting.active_dtype() is HALF
    assert {p.grad.dtype for p in model.parameters()} == {FULL}


def test_the_optimizers_state_follows_the_master_weights():
    model = small_model()
    optimizer = sgd(model)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    prepare(model, optimizer, "O2")
    stepped = optimizer.param_groups[0]["params"]
    assert {p.dtype for p in stepped} == {FULL}
    for parameter, momentum in zip(stepped, momenta, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum)


def test_a_group_that_is_added_later_has_master_weights_too():
    model = small_model()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    amp = prepare(model, optimizer, "O2", loss_scale=8.0)
    optimizer.add_param_group({"params": model[3].weight, "lr": 0.2})
    master = optimizer.param_groups[1]["params"][0]
    assert (master.dtype, master is model[3].weight) == (FULL, False)
    before = master.detach().clone()
    with amp.scale(model(torch.randn(2, 4)).square().sum()) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(master, before)
    assert torch.equal(master.to(HALF), model[3].weight)


def test_master_weights_follow_what_others_write_and_keep_their_own_digits():
    model = nn.Linear(3, 1, bias=False)
    optimizer = sgd(model)
    prepare(model, optimizer, "O2")
    (master,) = optimizer.param_groups[0]["params"]
    digits = master.detach().clone()
    with torch.no_grad():
        model.weight[0, 1] = 0.5
    optimizer.step()
    assert master[0, 1] == 0.5
    assert torch.equal(master[0, [0, 2]], digits[0, [0, 2]])


def test_master_weights_begin_with_the_digits_that_the_cast_takes_away():
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    alias = model[0].weight.data
    optimizer = sgd(model)
    amp = prepare(model, optimizer, "O2")
    masters = optimizer.param_groups[0]["params"]
    assert all(torch.equal(master, p) for master, p in zip(masters, before, strict=True))
    assert not torch.equal(model[0].weight.float(), before[0])
    with amp.scale(model(torch.randn(2, 4)).square().sum()) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(alias, before[0])


def test_nothing_outlives_the_model_and_the_optimizer():
    model = small_model()
    optimizer = sgd(model)
    amp = prepare(model, optimizer, "O2", loss_scale=8.0)
    train(model, optimizer, amp, torch.randn(1, 8, 4))
    watched = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer, amp
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3


# --------------------------------------------------------------------------- losses and steps


def overflow(model):
    """A loss whose gradient is inf."""
    return model(torch.full((2, 4), 1.0)).sum() * float("inf")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_one_step_and_says_so(level):
    model = small_model()
    optimizer = sgd(model)
    told = []
    amp = prepare(model, optimizer, level, tell=told.append)
    x = torch.randn(4, 4)
    before = copy.deepcopy(model.state_dict())
    with amp.scale(overflow(model)) as scaled:
        scaled.backward()
    optimizer.step()
    assert told == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    ]
    after = model.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items() if "weight" in n)
    optimizer.zero_grad()
    with amp.scale(model(x).square().mean()) as scaled:
        scaled.backward()
    optimizer.step()
    assert len(told) == 1
    assert not torch.equal(model.state_dict()["3.weight"], before["3.weight"])
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 1}}


@pytest.mark.parametrize("schedule_first", [False, True])
def test_a_schedule_counts_a_skipped_step_and_does_not_complain(schedule_first):
    model = small_model()
    optimizer = sgd(model)
    schedule = StepLR(optimizer, 1, 0.5) if schedule_first else None
    amp = prepare(model, optimizer, "O2")
    schedule = schedule or StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with amp.scale(overflow(model)) as scaled:
                scaled.backward()
            optimizer.step()
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("delay", [False, True])
def test_accumulated_gradients_are_those_of_the_sum(level, delay):
    x = torch.randn(3, 2, 4)
    model, reference = small_model().eval(), small_model().eval()
    optimizer = sgd(model)
    amp = prepare(model, optimizer, level, loss_scale=64.0)
    for k in range(3):
        reference(x[k]).square().sum().backward()
        with amp.scale(model(x[k]).square().sum(), delay_unscale=delay and k < 2) as scaled:
            scaled.backward()
    for stepped, expected in zip(
        optimizer.param_groups[0]["params"], reference.parameters(), strict=True
    ):
        torch.testing.assert_close(stepped.grad.float(), expected.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_several_losses_and_optimizers_have_scales_of_their_own(level, bad):
    first, second = models = [small_model(), small_model()]
    optimizers = [sgd(model) for model in models]
    amp = prepare(models, optimizers, level, num_losses=3, max_loss_scale=256.0)
    x = torch.randn(2, 4)
    before = [sums_of_parameters(model) for model in models]
    losses = [
        (lambda: first(x).square().mean(), [optimizers[0]]),
        (lambda: second(x).square().mean(), [optimizers[1]]),
        (lambda: (first(x) + second(x)).square().mean(), optimizers),
    ]
    for k, (loss, reached) in enumerate(losses):
        with amp.scale(loss() * (float("inf") if k == bad else 1), reached, k) as scaled:
            scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [scaler.scale for scaler in amp.scalers] == [
        128.0 if k == bad else 256.0 for k in range(3)
    ]
    stands = [sums_of_parameters(m) == s for m, s in zip(models, before, strict=True)]
    assert stands == [bad in (0, 2), bad in (1, 2)]


def test_a_fixed_scale_steps_as_if_there_were_none():
    x = torch.randn(8, 4)
    ends = []
    for loss_scale in (1.0, 1024.0):
        model = small_model()
        optimizer = sgd(model)
        amp = prepare(model, optimizer, "O0", loss_scale=loss_scale)
        for _ in range(4):
            optimizer.zero_grad()
            with amp.scale(model(x).square().mean()) as scaled:
                scaled.backward()
            optimizer.step()
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def train(model, optimizer, amp, batches):
    for x in batches:
        optimizer.zero_grad()
        with amp.scale(model(x).square().mean()) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_resumed_training_goes_on_bit_by_bit(level):
    batches = torch.randn(6, 8, 4)

    def built():
        model = small_model()
        optimizer = sgd(model, 0.01)
        return model, optimizer, prepare(model, optimizer, level, loss_scale="dynamic")

    parts = built()
    train(*parts, batches[:3])
    saved = pickle.dumps([part.state_dict() for part in parts])
    train(*parts, batches[3:])
    resumed = built()
    for part, state in zip(resumed, pickle.loads(saved), strict=True):
        part.load_state_dict(state)
    train(*resumed, batches[3:])
    ours, theirs = parts[0].state_dict(), resumed[0].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert parts[2].state_dict() == resumed[2].state_dict()


# -------------------------------------------------------------------------------- bad input


def test_mistakes_are_named():
    model = small_model()
    optimizer = sgd(model)
    with pytest.raises(
        PrecisionError,
        match=r"parameter 0.weight is torch.float16.*leave out".replace("leave", "Leave"),
    ):
        prepare(small_model().half(), level="O2")
    with pytest.raises(PrecisionError, match=r"parameter 0.weight is torch.float64"):
        prepare(small_model().double(), level="O1")
    with pytest.raises(PrecisionError, match=r"already in DataParallel.*Set the precision first"):
        prepare(nn.DataParallel(small_model()), level="O1")
    with pytest.raises(PrecisionError, match="already replicated"):
        prepare(instep.replicate(small_model()), level="O1")
    amp = prepare(model, optimizer, "O2")
    with pytest.raises(PrecisionError, match="precision of this model is set already"):
        prepare(model, sgd(small_model()))
    with pytest.raises(PrecisionError, match="precision of this optimizer is set already"):
        prepare(small_model(), optimizer)
    with pytest.raises(PrecisionError, match=r"step\(closure\) under loss scaling.*O0"):
        optimizer.step(lambda: 0.0)
    with (
        pytest.raises(PrecisionError, match="this optimizer's precision was never set"),
        amp.scale(torch.ones(()), sgd(small_model())),
    ):
        pass
    with (
        pytest.raises(PrecisionError, match="loss 1 does not exist: num_losses is 1"),
        amp.scale(torch.ones(()), loss_id=1),
    ):
        pass
    with amp.scale(model(torch.randn(2, 4)).sum(), delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(PrecisionError, match=r"still scaled.*delay_unscale=True"):
        optimizer.step()


def test_a_closure_without_scaling_is_the_optimizers_own_affair():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1)
    prepare(model, optimizer, "O0")

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > closure()


# ------------------------------------------------------------------------------ several ranks


def data(n=43):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def scaled_training(log, level, loss_scale):
    """A scale changes nothing but the rounding of half precision, of which there is none here."""
    model = small_model()
    optimizer = sgd(model)
    amp = prepare(model, optimizer, level, loss_scale=loss_scale)
    model = instep.replicate(model)
    log.begin(model)
    with nothing_cast_afterwards():
        for x, y in log.batches(instep.shard(DataLoader(data(), 10))):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            with amp.scale(loss) as scaled:
                scaled.backward()
            log.loss(loss, len(x))
            log.step(optimizer, model)


@pytest.mark.parametrize("loss_scale", ["dynamic", 512.0])
def test_scaled_training_has_the_numbers_of_one_process(loss_scale):
    same_as_one_process(scaled_training, "O0", loss_scale, sizes=(2, 3))


def digits_accuracy(level, dtype, epochs=3):
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "digits.py"))
    torch.manual_seed(0)
    train_data, test_data = example["load_data"]()
    model = example["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    amp = prepare(model, optimizer, level, dtype=dtype)
    model = instep.replicate(model)
    with nothing_cast_afterwards():
        loader = instep.shard(DataLoader(train_data, 64, shuffle=True))
        for _ in range(epochs):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                with amp.scale(cross_entropy(model(x), y)) as scaled:
                    scaled.backward()
                optimizer.step()
        model.eval()
        accuracy = instep.Accuracy()
        with torch.no_grad():
            for x, y in instep.shard(DataLoader(test_data, 64)):
                accuracy.update(model(x), y)
        return accuracy.compute()[0]


@pytest.mark.nightly
def test_o1_and_o2_train_digits_to_the_accuracy_of_o0():
    (full,) = set(run(2, digits_accuracy, "O0", HALF))
    assert full > 0.9
    for level in ("O1", "O2"):
        for dtype in (HALF, torch.bfloat16):
            (accuracy,) = set(run(2, digits_accuracy, level, dtype))
            assert abs(accuracy - full) <= 0.01, (level, dtype)


def sums_of_parameters(model):
    return [p.detach().double().sum().item() for p in model.parameters()]


@ranks(2, 3)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    """Also where nobody sums gradients, so that the inf stays on its rank."""
    for level in ("O1", "O2"):
        model = small_model()
        optimizer = sgd(model)
        amp = prepare(model, optimizer, level, max_loss_scale=256.0)
        with nothing_cast_afterwards():
            before = sums_of_parameters(model)
            loss = overflow(model) if instep.rank == 1 else model(torch.randn(2, 4)).mean()
            with amp.scale(loss) as scaled:
                scaled.backward()
            optimizer.step()
            assert sums_of_parameters(model) == before
            assert amp.scalers[0].scale == 128.0


@ranks(2, 3)
def test_an_overflow_in_a_replica_skips_the_step_on_all():
    for level in ("O1", "O2"):
        model = small_model()
        optimizer = sgd(model)
        amp = prepare(model, optimizer, level, max_loss_scale=256.0)
        model = instep.replicate(model)
        with nothing_cast_afterwards():
            before = sums_of_parameters(model)
            (x,) = instep.shard((torch.ones(5, 4),))
            with amp.scale(model(x).mean() * (float("inf") if instep.rank == 1 else 1)) as scaled:
                scaled.backward()
            optimizer.step()
            assert sums_of_parameters(model) == before
            assert amp.scalers[0].scale == 128.0


@ranks(2)
def test_pytorchs_own_scaler_agrees_over_a_replica():
    model = instep.replicate(small_model())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    before = sums_of_parameters(model)
    for overflows in (True, False):
        optimizer.zero_grad()
        (x,) = instep.shard((torch.randn(5, 4),))
        with torch.autocast("cpu", HALF):
            loss = model(x).float().square().mean()
        if overflows and instep.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (sums_of_parameters(model) == before) is overflows
        assert scaler.get_scale() == 2.0**15
    assert len({str(s) for s in instep.all_gather_object(sums_of_parameters(model))}) == 1


def overflows_on_one_rank(log, divides, accumulates):
    """The loss of the last rank's rows is infinite in the second and in the fifth batch."""
    model = instep.replicate(small_model())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if divides:
        optimizer = instep.shard(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaled_step = SimpleNamespace(step=lambda: scaler.step(optimizer))
    log.begin(model)
    overflows = False
    for k, (x, y) in enumerate(log.batches(instep.shard(DataLoader(data(52), 5)))):
        loss = cross_entropy(model(x), y) / accumulates
        log.loss(loss, len(x))
        if k in (1, 4):
            overflows = True
            loss = loss * (float("inf") if instep.rank == instep.world_size - 1 else 1)
        scaler.scale(loss).backward()
        if (k + 1) % accumulates:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if overflows:
            scaler.step(optimizer)
        else:
            log.step(scaled_step, model)
        before = scaler.get_scale()
        scaler.update()
        assert scaler.get_scale() == before * (0.5 if overflows else 2)
        optimizer.zero_grad()
        overflows = False


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("accumulates", [1, 3])
def test_an_infinite_gradient_on_one_rank_skips_the_step_of_one_process(divides, accumulates):
    same_as_one_process(overflows_on_one_rank, divides, accumulates, sizes=(2, 3))


def accumulated(log, level):
    model = small_model()
    optimizer = sgd(model)
    amp = prepare(model, optimizer, level, loss_scale=1024.0)
    model = instep.replicate(model)
    log.begin(model)
    with nothing_cast_afterwards():
        batches = list(log.batches(instep.shard(DataLoader(data(32), 8))))
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            with instep.no_sync(), amp.scale(cross_entropy(model(first[0]), first[1])) as scaled:
                scaled.backward()
            with amp.scale(cross_entropy(model(second[0]), second[1])) as scaled:
                scaled.backward()
            log.step(optimizer, model)


def test_accumulation_without_messages_has_the_numbers_of_one_process():
    same_as_one_process(accumulated, "O0", sizes=(2, 3))


def masters_after_accumulation():
    model = small_model().eval()
    optimizer = sgd(model)
    amp = prepare(model, optimizer, "O2", loss_scale=64.0)
    model = instep.replicate(model)
    whole = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    first, second = instep.shard((whole[0],)), instep.shard((whole[1],))
    with instep.no_sync(), amp.scale(model(first[0]).square().mean()) as scaled:
        scaled.backward()
    with amp.scale(model(second[0]).square().mean()) as scaled:
        scaled.backward()
    return [p.grad for p in optimizer.param_groups[0]["params"]]


def test_master_gradients_accumulate_without_messages():
    (expected,) = run(1, masters_after_accumulation)
    for grads in run(3, masters_after_accumulation):
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3)


# ----------------------------------------------------------------------------------- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_on_a_gpu_levels_compute_in_half_precision_and_learn(level, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 3),
    ).cuda()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    amp = prepare(model, optimizer, level, dtype=dtype)
    x = torch.randn(48, 1, 8, 8, device="cuda")
    y = x.mean((1, 2, 3)).mul(20).clamp(-1, 1).add(1).round().long()
    losses = []
    for k in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        losses.append(loss.item())
        factor = float("inf") if k == 5 and amp.scalers[0].dynamic else 1.0
        with amp.scale(loss * factor) as scaled:
            scaled.backward()
        optimizer.step()
    assert set(seen) == {dtype}
    assert losses[-1] < losses[0] / 2
    if amp.scalers[0].dynamic:  # nothing was learnt from the step with the inf
        assert losses[6] == pytest.approx(losses[5], rel=1e-3)
    assert all(p.is_cuda for group in optimizer.param_groups for p in group["params"])
