"""`instep.shard(optimizer)` has the undivided optimizer's numbers, each rank 1/N of its state."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import instep
from instep.distributed.flight_record import record_format
from instep.errors import TrainingError
from instep.training.checkpoint import saved_objects
from instep.training.errors import CannotShardError, DriftError, ShardedTwiceError
from instep.training.optimizer_shards import sharded_step
from instep.training.optimizer_shards.layout import divide_elements, divide_parameters
from instep.verify.recording import changes
from pool import ranks, run, talking_over

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": lambda p: optim.Adam(p, 1e-2, foreach=False),
    "foreach": lambda p: optim.Adam(p, 1e-2, amsgrad=True, foreach=True),
    "fused": lambda p: optim.Adam(p, 1e-2, fused=True),
    "AdamW": lambda p: optim.AdamW(p, torch.tensor(1e-2), foreach=False),
    "NAdam": lambda p: optim.NAdam(p, 1e-2),
    "RAdam": lambda p: optim.RAdam(p, 1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, 1e-2),
    "Adamax": lambda p: optim.Adamax(p, 1e-2),
    "ASGD": lambda p: optim.ASGD(p, 1e-2),
    "Rprop": lambda p: optim.Rprop(p, 1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-2),
    "Muon": lambda p: optim.Muon([each for each in p if each.dim() == 2], 1e-2),
}

BY_DAY = ("momentum", "fused", "Muon")
"""Those that are trained over Gloo too in every run of the tests."""


def batches(n=6):
    """Batches of images and classes, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, 6, 6, generator=generator), torch.arange(5) % 4) for _ in range(n)]


def network():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4)
    )
    return model.to(memory_format=torch.channels_last)


def both(make):
    """The same replica twice, with an undivided and a divided optimizer."""
    models = [instep.replicate(network()) for _ in range(2)]
    plain, divided = (make(list(model.parameters())) for model in models)
    assert instep.shard(divided) is divided
    return models, (plain, divided)


def backward(model, optimizer, batch):
    x, y = instep.shard(batch)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


@ranks(2)
def test_a_graph_from_before_a_step_is_an_error_on_every_rank() -> None:
    """Also of parameters that the fused kernel has changed, which does not count its changes."""
    model = instep.replicate(nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64)))
    optimizer = instep.shard(optim.Adam(model.parameters(), 0.1, fused=True))
    before = [parameter._version for parameter in model.parameters()]
    loss = model(instep.shard(torch.ones(4, 64))).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert all(p._version > v for p, v in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def assert_equal(models, optimizers):
    for (name, a), b in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    plain, divided = (optimizer.state_dict() for optimizer in optimizers)
    assert plain["param_groups"] == divided["param_groups"]
    assert plain["state"].keys() == divided["state"].keys()
    for number, entries in plain["state"].items():
        assert list(entries) == list(divided["state"][number])
        for name, value in entries.items():
            other = divided["state"][number][name]
            assert other is value is None or torch.equal(value, other), (number, name)
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.stride()) == (other.dtype, other.stride()), name


def train_both(make):
    models, optimizers = both(make)
    for batch in batches():
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, optimizer, batch)
            optimizer.step()
    assert_equal(models, optimizers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "make"),
    [
        *(("shm", make) for make in OPTIMIZERS),
        *(
            pytest.param("gloo", make, marks=[] if make in BY_DAY else [pytest.mark.nightly])
            for make in OPTIMIZERS
        ),
    ],
)
def test_every_optimizer_has_the_numbers_of_the_undivided_one(make, backend):
    with talking_over(backend):
        run(3 if backend == "shm" else 2, train_with, make)


def train_with(make):
    train_both(OPTIMIZERS[make])


@ranks(2)
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_on_a_cpu_the_fused_kernel_takes_the_place_of_pytorchs_loops(kind) -> None:
    models = [instep.replicate(network()) for _ in range(3)]
    loops, fused, divided = (
        kind(model.parameters(), 1e-2, fused=fused)
        for model, fused in zip(models, (None, True, None), strict=True)
    )
    instep.shard(divided)
    for batch in batches():
        for model, optimizer in zip(models, (loops, fused, divided), strict=True):
            backward(model, optimizer, batch)
            optimizer.step()
    for a, b, c in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(b, c)
        assert torch.allclose(a, c, atol=1e-6)
    assert divided.state_dict()["param_groups"] == loops.state_dict()["param_groups"]


@ranks(2)
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_parameters_of_few_bits_have_those_of_pytorchs_loops(kind) -> None:
    models = [instep.replicate(network().bfloat16()) for _ in range(2)]
    optimizers = [kind(model.parameters(), 1e-2) for model in models]
    instep.shard(optimizers[1])
    for x, y in batches():
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, optimizer, (x.bfloat16(), y))
            optimizer.step()
    assert_equal(models, optimizers)


@ranks(1, 2, 3)
def test_what_scripts_do_around_a_step() -> None:
    """Groups, a scheduler made before and one made after, clipping, accumulation, hooks, a layer
    that is frozen at first, a group that comes later, gradients that are kept as zeros."""
    models = [instep.replicate(network()) for _ in range(2)]
    optimizers, schedulers, heard = [], [], ([], [])
    for model, log in zip(models, heard, strict=True):
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        groups = [{"params": [*model[0].parameters()], "lr": 3e-2}, {"params": [model[4].weight]}]
        optimizers.append(optim.Adam(groups, 1e-2, betas=(0.8, 0.99), foreach=False))
        schedulers.append([optim.lr_scheduler.StepLR(optimizers[-1], 2, 0.5)])
        optimizers[-1].register_step_pre_hook(lambda *_, log=log: log.append("before"))
        optimizers[-1].register_step_post_hook(lambda *_, log=log: log.append("after"))
    instep.shard(optimizers[1])
    for optimizer, chain in zip(optimizers, schedulers, strict=True):
        chain.append(optim.lr_scheduler.CosineAnnealingLR(optimizer, 6))
    for k, batch in enumerate(batches(8)):
        for model, optimizer, chain in zip(models, optimizers, schedulers, strict=True):
            if k == 3:
                model[0].requires_grad_(True)
            if k == 5:
                optimizer.add_param_group({"params": [model[4].bias, *model[1].parameters()]})
            if k == 6:
                optimizer.load_state_dict(optimizer.state_dict())
            if k % 2 == 0:
                optimizer.zero_grad(set_to_none=k % 4 == 0)
            x, y = instep.shard(batch)
            nn.functional.cross_entropy(model(x), y).backward()
            if k % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # "lr_scheduler.step() before …"
                    optimizer.step()
                    for scheduler in chain:
                        scheduler.step()
    assert_equal(models, optimizers)
    assert heard[0] == heard[1] == ["before", "after"] * 4


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_scheduler_sees_the_steps(made) -> None:
    run(2, schedule, made)


def schedule(made):
    model = instep.replicate(network())
    optimizer = optim.SGD(model.parameters(), 0.1)
    if made == "before":
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    instep.shard(optimizer)
    if made == "after":
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in batches(2):
        backward(model, optimizer, batch)
        optimizer.step()
        scheduler.step()  # warns, which is an error here, if it has seen no step
    assert optimizer.param_groups[0]["lr"] == 0.025


@ranks(2)
def test_a_script_may_change_parameters_between_steps() -> None:
    models, optimizers = both(lambda p: optim.SGD(p, 0.1, momentum=0.9))
    for k, batch in enumerate(batches()):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, optimizer, batch)
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    if k % 2:
                        parameter.clamp_(-0.2, 0.2)
                    else:
                        parameter.data = parameter.data * 0.9  # other memory
    assert_equal(models, optimizers)


class Counted(optim.Optimizer):
    """Momentum as an attribute, which a script may set, and a count of its own steps."""

    updates_by = "element"

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.momentum, self.count = 0.9, 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
            parameter.sub_(kept.mul_(self.momentum).add_(parameter.grad), alpha=0.1)


@ranks(1, 2, 3)
def test_attributes_are_those_of_the_scripts_optimizer() -> None:
    models, optimizers = both(Counted)
    for k, batch in enumerate(batches(3)):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.momentum = 0.9 - 0.3 * k
            backward(model, optimizer, batch)
            optimizer.step()
    assert [each.count for each in optimizers] == [3, 3]
    assert_equal(models, optimizers)


@ranks(2)
def test_a_closure_and_a_scaler() -> None:
    models, optimizers = both(lambda p: optim.Adam(p, 1e-2, fused=True))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in models]
    for k, batch in enumerate(batches()):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            x, y = instep.shard(batch)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * float("inf") if k == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_equal(models, optimizers)
    losses = [
        optimizer.step(lambda m=model, o=optimizer: backward(m, o, batches()[0]))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert_equal(models, optimizers)


@ranks(2, 3)
def test_each_rank_has_its_part_of_the_state() -> None:
    models, (plain, divided) = both(lambda p: optim.Adam(p, 1e-2))
    for model, optimizer in zip(models, (plain, divided), strict=True):
        backward(model, optimizer, batches()[0])
        optimizer.step()
    whole = sum(v.numel() for s in plain.state.values() for v in s.values() if v.dim())
    local = getattr(divided, sharded_step._SHARDS).local_state
    held = sum(value.numel() for s in local.values() for value in s.values() if value.dim())
    assert abs(held - whole / instep.world_size) <= 2 * 64  # parts begin at multiples of 64
    assert not divided.state


def train_and_save(folder, steps):
    model = instep.replicate(network())
    optimizer = instep.shard(optim.Adam(model.parameters(), 1e-2))
    checkpoint = instep.Checkpoint(folder, model=model, optimizer=optimizer, every=3)
    checkpoint.resume()
    for batch in batches()[checkpoint.steps : steps]:
        backward(model, optimizer, batch)
        optimizer.step()
        checkpoint.step()
    checkpoint.close()
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_checkpoint_goes_on_at_any_number_of_ranks_and_in_plain_pytorch(tmp_path, others):
    (whole, state), *_ = run(2, train_and_save, tmp_path / "whole", 6)
    run(2, train_and_save, tmp_path / "parts", 3)
    for parameters, _ in run(others, train_and_save, tmp_path / "parts", 6):
        for a, b in zip(whole, parameters, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=0 if others == 2 else 1e-5)
    plain = optim.Adam(network().parameters(), 1.0)
    plain.load_state_dict(copy.deepcopy(state))
    assert plain.param_groups[0]["lr"] == 1e-2
    assert len(plain.state) == 5


@ranks(1, 2)
def test_a_state_dict_is_not_changed_by_later_steps() -> None:
    model = instep.replicate(network())
    optimizer = instep.shard(optim.Adam(model.parameters(), 1e-2))
    first, *rest = batches()
    backward(model, optimizer, first)
    optimizer.step()
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    for batch in rest:
        backward(model, optimizer, batch)
        optimizer.step()
        if batch is rest[2]:
            optimizer.load_state_dict(state)
    for index, values in kept["state"].items():
        assert all(torch.equal(state["state"][index][name], values[name]) for name in values)


@ranks(1)
def test_a_checkpoint_copies_the_state_of_one_rank_no_second_time(tmp_path) -> None:
    def optimizer_of(model):
        optimizer = instep.shard(optim.Adam(model.parameters(), 1e-2))
        backward(model, optimizer, batches()[0])
        optimizer.step()
        return optimizer

    optimizer, other = (optimizer_of(instep.replicate(network())) for _ in range(2))
    state = saved_objects.state_of(optimizer)
    saved_objects.load_state(other, state, "optimizer", tmp_path)
    (weight, *_), (others, *_) = (
        optimizer.param_groups[0]["params"],
        other.param_groups[0]["params"],
    )
    addresses = {
        each["exp_avg"].data_ptr() for each in (optimizer.state[weight], other.state[others])
    }
    assert addresses == {state["state"][0]["exp_avg"].data_ptr()}


@ranks(1, 2, 3)
def test_a_parameter_without_elements_has_a_state_too() -> None:
    layer = nn.Linear(6, 3)
    layer.nothing = nn.Parameter(torch.zeros(0, 4))
    model = instep.replicate(layer)
    optimizer = instep.shard(optim.Adam(model.parameters()))
    for _ in range(2):
        x = instep.shard(torch.randn(6, 6))
        (model(x).mean() + model.nothing.sum()).backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert sorted(state["state"]) == [0, 1, 2]
        assert state["state"][2]["exp_avg"].shape == (0, 4)
        optimizer.load_state_dict(state)


@ranks(2)
def test_an_optimizer_that_has_stepped_is_divided_with_its_state() -> None:
    models = [instep.replicate(network()) for _ in range(2)]
    optimizers = [optim.Adam(model.parameters(), 1e-2, foreach=False) for model in models]
    for k, batch in enumerate(batches()):
        if k == 3:
            instep.shard(optimizers[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, optimizer, batch)
            optimizer.step()
    assert_equal(models, optimizers)


class Whitened(optim.SGD):
    """An optimizer of a script."""


class Signed(Whitened):
    updates_by = "element"


@ranks(2)
def test_what_cannot_be_divided_is_refused() -> None:
    model = instep.replicate(network())
    with pytest.raises(CannotShardError, match=r"instep\.shard does not know LBFGS"):
        instep.shard(optim.LBFGS(model.parameters()))
    with pytest.raises(CannotShardError, match='updates_by = "element"` in Whitened'):
        instep.shard(Whitened(model.parameters(), 0.1))
    with pytest.raises(CannotShardError, match="differentiable=True"):
        instep.shard(optim.SGD(model.parameters(), 0.1, differentiable=True))
    with pytest.warns(UserWarning, match="duplicate"):
        doubled = optim.SGD([*model.parameters()] * 2, 0.1)
    with pytest.raises(CannotShardError, match="a group of this optimizer twice"):
        instep.shard(doubled)
    instep.shard(signed := Signed(model.parameters(), 0.1))
    with pytest.raises(ShardedTwiceError, match="already divided"):
        instep.shard(signed)
    backward(model, signed, batches()[0])
    signed.step()
    lone = nn.Linear(2, 2)
    optimizer = instep.shard(optim.SGD(lone.parameters(), 0.1))
    lone(torch.ones(1, 2)).sum().backward()
    with pytest.raises(CannotShardError, match=r"Call instep.replicate\(model\)"):
        optimizer.step()
    embedding = instep.replicate(nn.Embedding(5, 2, sparse=True))
    optimizer = instep.shard(optim.SGD(embedding.parameters(), 0.1))
    embedding(instep.shard(torch.arange(4))).sum().backward()
    with pytest.raises(CannotShardError, match="sparse gradient"):
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("what", ["differs", "missing"])
def test_a_gradient_that_only_one_rank_changes_is_an_error(what) -> None:
    """The parameters would be equal on all ranks, and wrong."""
    model = instep.replicate(network())
    optimizer = instep.shard(optim.SGD(model.parameters(), 1e-2))
    message = {
        "differs": "the gradient of parameter 4.weight of rank 1 differs from that of rank 0",
        "missing": "the gradient of parameter 4.weight is not the same on all ranks .*1: missing",
    }
    weight = model[4].weight
    backward(model, optimizer, batches()[0])
    optimizer.step()
    backward(model, optimizer, batches()[1])
    if instep.rank == 1:
        weight.grad = None if what == "missing" else weight.grad * 1.01
    with pytest.raises(DriftError, match=message[what]):
        optimizer.step()


@ranks(2)
def test_errors_between_ranks_name_what_its_collectives_are_for() -> None:
    model = instep.replicate(network())
    optimizer = instep.shard(optim.Adam(model.parameters(), 1e-2))
    backward(model, optimizer, batches()[0])
    with sharded_step.recorder.with_detail("outside"):
        optimizer.step()
        optimizer.state_dict()
        assert sharded_step.recorder.detail == "outside"
    ops = {
        entry.op for entry in record_format.read(sharded_step.recorder.file_descriptor()).entries
    }
    for purpose in ("step", "state_dict"):
        assert any(op.endswith(f"({purpose} of a divided optimizer)") for op in ops), ops
    assert "all_gather (batch statistics)" in ops


@ranks(2)
def test_a_step_with_gradients_that_were_not_summed_is_an_error() -> None:
    model = instep.replicate(network())
    optimizer = instep.shard(optim.SGD(model.parameters(), 1e-2))
    data = [instep.shard(tuple(each.clone() for each in batches()[0])) for _ in range(4)]
    for (x, y), _ in instep.accumulate(data, 3):
        nn.functional.cross_entropy(model(x), y).backward()
        break
    with pytest.raises(TrainingError, match="accumulate was left before its last batch"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, batches()[1])
    optimizer.step()


@ranks(2)
def test_what_would_lose_state_in_silence_is_refused() -> None:
    model = instep.replicate(network())
    optimizer = instep.shard(optim.Adam(model.parameters(), 1e-2))
    backward(model, optimizer, batches()[0])
    optimizer.step()
    weight = model[4].weight
    for use in (
        lambda: optimizer.state[weight],
        lambda: optimizer.state.get(weight),
        lambda: optimizer.state.__setitem__(weight, {}),
    ):
        with pytest.raises(CannotShardError, match="each rank keeps a part of it"):
            use()
    model[0].weight.data = model[0].weight.data.contiguous()
    with pytest.raises(CannotShardError, match=r"\(5, 3, 3, 3\) has other strides"):
        optimizer.step()
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(CannotShardError, match="taken out of a group"):
        optimizer.step()


@ranks(1)
def test_one_process_divides_nothing_but_refuses_the_same() -> None:
    optimizer = optim.Adam(network().parameters(), 1e-2)
    assert instep.shard(optimizer) is optimizer
    with pytest.raises(ShardedTwiceError, match="already divided"):
        instep.shard(optimizer)


@pytest.mark.parametrize("divide", [divide_elements, divide_parameters])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_element_is_updated_by_one_rank(divide, size) -> None:
    parameters = [torch.zeros(shape) for shape in [(), (3, 4), (0, 2), (30, 50), (1, 1), (129,)]]
    for rank in divide(parameters, size):
        for part in rank:
            part.view(part.parameter).add_(1)
    assert all(torch.equal(each, torch.ones_like(each)) for each in parameters)


@ranks(2)
def test_a_divided_optimizer_is_freed_with_its_last_reference():
    model = instep.replicate(network())
    optimizer = instep.shard(optim.Adam(model.parameters()))
    for batch in batches(2):
        backward(model, optimizer, batch)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    freed = [weakref.ref(each) for each in (optimizer, getattr(optimizer, sharded_step._SHARDS))]
    gc.disable()
    try:
        del optimizer
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@ranks(2)
def test_a_copy_of_a_divided_optimizer_says_where_its_state_is(copied):
    model = instep.replicate(network())
    optimizer = instep.shard(optim.Adam(model.parameters()))
    assert isinstance(optimizer, optim.Adam)
    with pytest.raises(CannotShardError, match=r"optimizer\.state_dict\(\), on all ranks, has"):
        copied(optimizer)


def verify_loads(folder):
    model = instep.replicate(network())
    names = dict(model.named_parameters())
    plain, divided = (optim.Adam(model.parameters(), foreach=False) for _ in range(2))
    instep.shard(divided)
    backward(model, plain, batches()[0])
    plain.step()
    saved = changes.copy_state(plain, names, {})
    if instep.rank == 0:
        torch.save(saved, f"{folder}/state1.pt")
    instep.barrier()
    changes.load_state(Path(folder), 1, divided, names, {})
    expected, loaded = (each.state_dict()["state"] for each in (plain, divided))
    for k, state in expected.items():
        assert all(torch.equal(value, loaded[k][name]) for name, value in state.items())


def test_verify_gives_it_the_state_of_one_process(tmp_path) -> None:
    run(2, verify_loads, str(tmp_path))
