"""What a forward changes beside its outputs is as in one process, however it changes it."""

import copy
import itertools
import os
import warnings
from functools import partial
from itertools import starmap
from operator import add, mul, truediv

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F  # noqa: N812

import instep
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.compare.rank_mismatch import first_mismatch
from instep.unedited.sharded_call.run.sharded_output import LARGE
from pool import ranks
from sharded_training import sharding

pytestmark = pytest.mark.slow


class Initialized(nn.Module):
    """Its parameters come from its first batch, as those of ActNorm."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.is_ready = False

    def forward(self, x):
        if not self.is_ready:
            self.shift.data.copy_(-x.mean(0))
            self.is_ready = True
        return x + self.shift


class Momentum(nn.Module):
    """A second network that follows the first, as in MoCo and BYOL."""

    def __init__(self, by_assignment):
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.by_assignment = by_assignment

    def forward(self, x):
        pairs = zip(self.online.parameters(), self.target.parameters(), strict=True)
        for followed, follower in pairs:
            if self.by_assignment:
                follower.data = 0.5 * follower.data + 0.5 * followed.data
            else:
                follower.data.mul_(0.5).add_(followed.data, alpha=0.5)
        return self.online(x) + self.target(x).detach()


class Masked(nn.Linear):
    """Some of its weights are to be zero, as those of PixelCNN's convolutions."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class Bounded(nn.Linear):
    """Its rows have a norm of `bound` at most, as in EEGNet."""

    def __init__(self, bound):
        super().__init__(4, 4)
        self.bound = bound

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, self.bound)
        return super().forward(x)


def grown(steps=14):
    """Its norms reach the bound when its calls have been divided for a while."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Bounded(1.2))
    target = torch.full((6, 4), 10.0)

    def norms(_):
        return model[1].weight.norm(dim=1)

    return trained(model, norms, steps, lambda out: (out - target).square().mean() / 8)


class Renewed(nn.Linear):
    def forward(self, x):
        self.bias = nn.Parameter(self.bias.detach() / 2)
        return super().forward(x)


class Centred(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.centre = torch.zeros(4)

    def forward(self, x):
        y = super().forward(x)
        self.centre.data.mul_(0.9).add_(y.detach().mean(0))
        return y


of_module, teacher = torch.zeros(4), nn.BatchNorm1d(4)


class OfGlobal(nn.Linear):
    def forward(self, x):
        of_module.mul_(0.9).add_(x.mean(0))
        return super().forward(x)


class OfTeacher(nn.Linear):
    def forward(self, x):
        return super().forward(x) - teacher(x).detach()


class Counted(nn.Linear):
    calls, sizes = 0, []

    def forward(self, x):
        Counted.calls += 1
        self.sizes.append(len(x))
        return super().forward(x) * Counted.calls


def halving():
    rate = 1.0
    while True:
        yield rate
        rate /= 2


def one_of_which_has_ended():
    pairs = itertools.zip_longest([0.5], range(7), fillvalue=1)
    next(pairs), next(pairs)
    return starmap(add, pairs)


class Annealed(nn.Linear):
    def __init__(self, rates):
        super().__init__(4, 4)
        self.rates = rates

    def forward(self, x):
        return super().forward(x) * next(self.rates)


ITERATORS = {
    "a generator": halving,
    "a counter": itertools.count,
    "of a list": lambda: iter([0.5, 0.4, 0.3, 0.2, 0.1]),
    "of a range": lambda: iter(range(5)),
    "of a dict": lambda: iter({3: 0, 2: 0, 1: 0, 5: 0, 4: 0}),
    "that begins anew": lambda: itertools.cycle([0.5, 0.25]),
    "of another one": lambda: map(float, filter(None, range(6))),
    "of a product": lambda: starmap(mul, itertools.product((0.5, 0.4), (1, 2, 3))),
    "of permutations": lambda: starmap(truediv, itertools.permutations((1, 2, 3), 2)),
    "of combinations": lambda: starmap(truediv, itertools.combinations((1, 2, 3, 4), 2)),
    "one of two": lambda: itertools.tee([0.5, 0.4, 0.3, 0.2, 0.1])[1],
    "of the longest": one_of_which_has_ended,
    "of a function": lambda: iter(partial(next, itertools.count(1)), 0),
}


class WithAttribute(nn.Linear):
    """Counts its calls in its weight itself."""

    def forward(self, x):
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        return super().forward(x) * self.weight.calls


class InEnvironment(nn.Linear):
    """Counts in a variable of the environment every so many calls."""

    def __init__(self, every):
        super().__init__(4, 4)
        self.every, self.calls = every, 0
        os.environ["INSTEP_TEST_COUNT"] = "0"

    def forward(self, x):
        self.calls += 1
        if self.calls % self.every == 0:
            os.environ["INSTEP_TEST_COUNT"] = str(self.count() + 1)
        return super().forward(x) * (1 + self.count())

    def count(self):
        return int(os.environ["INSTEP_TEST_COUNT"])


class Explained(nn.Linear):
    """Keeps the gradient of its output, as Grad-CAM."""

    kept = None

    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda grad: setattr(self, "kept", grad))
        return y


class Hooked(nn.Linear):
    """Keeps gradients by a hook on a node, on the way into it, or on two tensors at once."""

    def __init__(self, register):
        super().__init__(4, 4)
        self.register, self.kept = register, torch.zeros(4)

    def forward(self, x):
        y, z = super().forward(x).sin(), x @ self.weight
        hooks = {
            "node": lambda: y.grad_fn.register_hook(lambda grads, _: self.keep(grads[0])),
            "into a node": lambda: y.grad_fn.register_prehook(lambda grads: self.keep(grads[0])),
            "tensors": lambda: register_multi_grad_hook([y, z], lambda grads: self.keep(grads[1])),
        }
        hooks[self.register]()
        return y + z

    def keep(self, grad):
        self.kept = grad.sum(0)


class Potential(nn.Linear):
    """Frees the graph of one of its outputs, as a potential with forces."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum(1)
        return energy, torch.autograd.grad(energy.sum(), x)[0]


def in_closure():
    seen = torch.zeros(4)

    class OfClosure(nn.Linear):
        def forward(self, x):
            seen.add_(x.mean(0))
            return super().forward(x)

    return trained(OfClosure(4, 4), lambda _: seen)


def trained(model, state, steps=5, loss=lambda out: out.square().mean()):
    """The outputs, the state after each step, and the parameters at the end."""
    record = []
    for _ in range(steps):
        out = model(torch.randn(6, 4) + 1)
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad and not isinstance(out, tuple):
            model.zero_grad()
            loss(first).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
        record += [first.detach().clone(), torch.as_tensor(state(model)).detach().clone()]
    return [*record, *(p.detach().clone() for p in model.parameters())]


def of_global():
    of_module.zero_()
    return trained(OfGlobal(4, 4), lambda _: of_module)


def of_teacher():
    teacher.reset_running_stats()
    return trained(
        OfTeacher(4, 4), lambda _: torch.cat([teacher.running_mean, teacher.running_var])
    )


def of_class():
    Counted.calls, Counted.sizes = 0, []
    return trained(Counted(4, 4), lambda _: [Counted.calls, *Counted.sizes])


def in_class_of_closure():
    class Calls:
        count = 0

    class OfClosure(nn.Linear):
        def forward(self, x):
            Calls.count += 1
            return super().forward(x) * Calls.count

    return trained(OfClosure(4, 4), lambda _: Calls.count)


def with_hook():
    model, norms = nn.Linear(4, 4), []
    model.weight.register_hook(lambda grad: norms.append(float(grad.norm())))
    return trained(model, lambda _: norms)


CASES = {
    "parameters set by the first batch": lambda: trained(Initialized(), lambda m: m.shift),
    "a momentum network": lambda: trained(Momentum(False), lambda m: m.target.weight),
    "one by assignment": lambda: trained(Momentum(True), lambda m: m.target.weight),
    "weights that are masked": lambda: trained(Masked(), lambda m: m.weight),
    "a norm that is bounded": lambda: trained(Bounded(0.5), lambda m: m.weight),
    "a norm that is bounded later": grown,
    "a parameter that is made anew": lambda: trained(Renewed(4, 4), lambda m: m.bias),
    "an attribute by .data": lambda: trained(Centred(), lambda m: m.centre),
    "a tensor of the closure": in_closure,
    "a global tensor": of_global,
    "a global module": of_teacher,
    "attributes of the class": of_class,
    "attributes of a class of the closure": in_class_of_closure,
    "an attribute of a parameter": lambda: trained(WithAttribute(4, 4), lambda m: m.weight.calls),
    "a variable of the environment": lambda: trained(InEnvironment(1), InEnvironment.count),
    "one that changes later": lambda: trained(InEnvironment(6), InEnvironment.count, 8),
    **{
        f"an iterator, {name}": lambda make=make: trained(Annealed(make()), lambda _: 0)
        for name, make in ITERATORS.items()
    },
    "a hook on a gradient": lambda: trained(Explained(4, 4), lambda m: m.kept),
    "a hook on a node": lambda: trained(Hooked("node"), lambda m: m.kept),
    "a hook into a node": lambda: trained(Hooked("into a node"), lambda m: m.kept),
    "a hook on two tensors": lambda: trained(Hooked("tensors"), lambda m: m.kept),
    "a hook on a parameter": with_hook,
    "a graph that is freed": lambda: trained(Potential(4, 4), lambda _: 0),
}


MOVING = {
    "a momentum network": lambda: Momentum(False),
    "one by assignment": lambda: Momentum(True),
    "a mask": Masked,
    "a bound": lambda: Bounded(0.5),
}


@ranks(2)
@pytest.mark.parametrize("name", MOVING)
def test_a_forward_that_moves_parameters_is_divided_from_the_second_call_on(name):
    with sharding():
        trained(MOVING[name](), lambda _: 0)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (4, 1)


@ranks(2)
def test_a_forward_that_begins_to_move_parameters_is_compared_anew():
    with sharding():
        norms = grown()[1:-4:2]
    assert norms[2].max() < 1.2 - 1e-3  # of calls that are divided before the bound is reached
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (13, 1)


@ranks(2)
def test_that_a_forward_makes_a_parameter_anew_is_reported():
    with sharding() as log:
        trained(Renewed(4, 4), lambda _: 0)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Renewed whole: its forward makes the parameter bias anew. "
            "[INS711]\n"
        )


class RenewedLater(nn.Linear):
    """No line or branch tells that it begins to."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        late = int(format(self.calls, "d")) // 6 % 2
        name, value = (("note", 0), ("bias", nn.Parameter(self.bias.detach() / 2)))[late]
        setattr(self, name, value)
        return super().forward(x)


@ranks(2)
def test_a_forward_that_begins_to_make_a_parameter_anew_is_an_error():
    with sharding(), pytest.raises(ShardedCallError, match="began to make its parameter bias anew"):
        trained(RenewedLater(4, 4), lambda _: 0, 8)


class NormalizesLater(nn.Module):
    """Begins to do something else while it normalises; no line or branch tells that it will."""

    def __init__(self):
        super().__init__()
        self.norm, self.bias = nn.BatchNorm1d(4), nn.Parameter(torch.ones(4), requires_grad=False)
        self.acts, self.calls = (torch.clone, self.begun), 0

    def forward(self, x):
        self.calls += 1
        act = self.acts[int(format(self.calls, "d")) // 6 % 2]
        return self.norm(act(x)) + self.bias


class DrawsLater(NormalizesLater):
    @staticmethod
    def begun(x):
        return x * (1 + torch.rand_like(x))


class TrainsLater(NormalizesLater):
    def begun(self, x):
        return x * self.bias.requires_grad_()


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            DrawsLater,
            "DrawsLater began to draw random numbers in its forward, which it did not before, and "
            "has changed its buffers meanwhile. Run this script with --plain, or let it draw from",
        ),
        (
            TrainsLater,
            "TrainsLater began to train its parameter bias in its forward, and has changed its "
            "buffers meanwhile. Run this script with --plain, or set requires_grad before the call",
        ),
    ],
)
def test_a_forward_that_has_changed_buffers_is_not_run_again(kind, message):
    model = kind()
    with sharding(), pytest.raises(ShardedCallError, match=message):
        trained(model, lambda _: 0, 8)
    assert modules.call_counts.sharded > 0


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_what_a_forward_changes_is_as_in_one_process(case):
    torch.manual_seed(1)
    expected = CASES[case]()
    torch.manual_seed(1)
    with sharding():
        found = CASES[case]()
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.scale


@ranks(2)
def test_parameters_have_their_attributes_in_divided_calls():
    model, x = Scaled(4, 4), torch.randn(6, 4)
    model.weight.scale = 3
    expected = model(x)
    with sharding():
        torch.testing.assert_close(model(x), expected)
    assert modules.call_counts.sharded == 1


def large_rows():
    model = nn.Linear(4, 1 + LARGE // 4 // 6)
    return model, model(torch.randn(6, 4)), torch.arange(6)


def hooked_late():
    model, out, target = large_rows()
    loss = F.cross_entropy(out, target)
    out.register_hook(lambda grad: grad * torch.arange(6.0).view(6, 1))
    loss.backward()
    return [model.weight.grad]


def retained():
    model, out, target = large_rows()
    loss = F.cross_entropy(out, target) + out.square().mean()
    out.retain_grad()
    loss.backward(retain_graph=True)
    first = out.grad.clone()
    loss.backward()
    return [first, out.grad, model.bias.grad]


def asked_for():
    _, out, target = large_rows()
    loss = F.cross_entropy(out.view(6, -1), target)
    unused = torch.ones(2, requires_grad=True)
    found = torch.autograd.grad(loss, [unused, out], allow_unused=True)
    assert found[0] is None
    return [found[1]]


@ranks(3)
@pytest.mark.parametrize("case", [hooked_late, retained, asked_for])
def test_the_gradient_of_rows_that_stay_on_their_ranks_is_that_of_all_rows(case):
    torch.manual_seed(1)
    expected = case()
    torch.manual_seed(1)
    with sharding():
        found = case()
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-8)


ORDERS = {
    "transposed": lambda y: y.transpose(1, 2),
    "rows last": lambda y: y.permute(2, 0, 1),
    "with gaps": lambda y: y[:, :, ::2],
}


@ranks(2)
@pytest.mark.parametrize("order", ORDERS)
def test_a_joined_output_has_its_dimensions_in_memory_in_the_order_of_one_process(order):
    class Permuted(nn.Linear):
        def forward(self, x):
            return ORDERS[order](super().forward(x))

    model, x = Permuted(4, 6), torch.randn(6, 5, 4)
    whole = model(x)
    expected = sorted(range(3), key=lambda dim: -whole.stride(dim))
    with sharding():
        for _ in range(4):
            found = model(x)
            assert sorted(range(3), key=lambda dim: -found.stride(dim)) == expected
            torch.testing.assert_close(found, whole)


@ranks(2)
def test_nested_tensors_are_left_to_torch():
    model = nn.Linear(4, 3)
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is a prototype
            rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
        with sharding():
            found = [model(rows).to_padded_tensor(0.0) for _ in range(3)]
        assert torch.equal(found[2], model(rows).to_padded_tensor(0.0))


@ranks(2)
def test_arguments_with_infinite_values_are_compared_as_others_are():
    from instep.distributed.communication.transport import get_transport

    def mismatch(*values):
        return first_mismatch(nn.Linear(1, 1), values, get_transport())

    torch.manual_seed(3)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    assert mismatch(mask, odd) is None
    assert mismatch(odd.roll(instep.rank)) is not None
    assert mismatch(odd + instep.rank * torch.tensor([0.0, 0.0, 0.0, 1.0])) is not None
    assert mismatch(odd * torch.tensor([1.0 - 2 * instep.rank, 1.0, 1.0, 1.0])) is not None


class Rare(nn.Module):
    """Some of its rows look something up in a table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x, ids):
        (rare,) = (ids >= 0).nonzero(as_tuple=True)
        return self.out(x.index_add(0, rare, self.table(ids[rare])) if len(rare) else x)


def rare_rows():
    model, grads = Rare(), []
    for k in range(6):
        ids = torch.full((9,), -1)
        ids[k : k + 2] = k
        model.zero_grad()
        model(torch.randn(9, 4), ids).square().mean().backward()
        grads += [model.table.weight.grad.to_dense(), model.out.weight.grad.clone()]
    return grads


@ranks(3)
def test_a_table_with_sparse_gradients_may_have_rows_of_some_ranks_only():
    torch.manual_seed(1)
    expected = rare_rows()
    torch.manual_seed(1)
    with sharding():
        found = rare_rows()
    assert modules.call_counts.sharded == 6
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


class Unfrozen(nn.Linear):
    """Sets the flag of its parameters in each call, though it never changes."""

    def forward(self, x):
        for p in self.parameters():
            p.requires_grad = True
        return super().forward(x)


@ranks(2)
def test_that_a_forward_sets_requires_grad_is_the_reason_that_is_given():
    with sharding() as log:
        trained(Unfrozen(4, 4), lambda _: 0)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Unfrozen whole: its forward freezes or unfreezes "
            "parameters. [INS711]\n"
        )


class Codes(nn.Linear):
    """Takes its first batch's rows for its codes."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("codes", torch.zeros(3, 4))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x):
        z = super().forward(x)
        if not self.is_ready:
            self.codes.copy_(z[:3].detach())
            self.is_ready.fill_(True)
        return z - self.codes[torch.cdist(z, self.codes).argmin(1)]


class Observing(nn.Linear):
    """Takes the largest element of its first two batches for its scale."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = 0
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if self.seen < 2:
            self.seen += 1
            self.largest.fill_(max(self.largest.item(), x.abs().max().item()))
        return super().forward(x / self.largest)


class Normed(nn.Linear):
    """Makes a parameter from the outputs of its first batch."""

    def __init__(self):
        super().__init__(4, 4)
        self.gain, self.is_ready = nn.Parameter(torch.ones(4)), False

    def forward(self, x):
        out = super().forward(x)
        if not self.is_ready:
            self.gain, self.is_ready = nn.Parameter(1 / out.detach().std(0)), True
        return out * self.gain


@ranks(2)
@pytest.mark.parametrize(("kind", "whole"), [(Codes, 1), (Observing, 2), (Normed, 1)])
def test_a_module_that_its_first_batches_set_up_is_divided_after_them(kind, whole):
    torch.manual_seed(0)
    plain = kind()
    model, batches = copy.deepcopy(plain), torch.randn(5, 6, 4)
    expected = [plain(x) for x in batches]
    with sharding() as log:
        found = [model(x).detach() for x in batches]
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right.detach())
    assert (modules.call_counts.whole, modules.call_counts.sharded) == (whole, 5 - whole)
    assert "whole" not in log.getvalue()


@ranks(2)
def test_an_iterator_of_which_some_rows_alone_take_values_goes_on_as_in_one_process():
    numbers = itertools.count()

    class Numbered(nn.Linear):
        def forward(self, x):
            self.last = list(itertools.islice(numbers, int((x[:, 0] > 1).sum())))[-1:]
            return super().forward(x)

    model, x = Numbered(4, 2), torch.zeros(6, 4)
    with sharding():
        model(x + torch.tensor([0.5, 0, 0, 0]))
        x[5, 0] = 2
        for _ in range(3):
            model(x)
    assert next(numbers) == 3
