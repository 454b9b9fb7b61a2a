"""What the script's functions and hooks keep in a backward is as in one process."""

import functools
from typing import ClassVar

import pytest
import torch
from torch import nn

from instep.unedited.sharded_call import modules
from pool import ranks
from sharded_training import sharding


class Meter:
    def __init__(self):
        self.sizes = []

    def add(self, grad):
        self.sizes.append(len(grad))


class Noted(torch.autograd.Function):
    """Notes in a list of its class how many rows it has seen, and in a global one how often it was
    called."""

    sizes: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Noted.sizes.append(len(grad))
        return grad


calls = []


class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        calls.append(1)
        return grad / len(calls)


class Metered(torch.autograd.Function):
    """Hands what its backward sees to an object that its forward was given."""

    @staticmethod
    def forward(ctx, x, meter):
        ctx.meter = meter
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.meter.add(grad)
        return grad, None


class Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean):
        ctx.mean = mean
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.mean.mul_(0.9).add_(grad.abs().mean(), alpha=0.1)
        return grad, None


class AveragedData(Averaged):
    @staticmethod
    def backward(ctx, grad):
        ctx.mean.data.mul_(0.9).add_(grad.abs().mean(), alpha=0.1)
        return grad, None


class Layer(nn.Linear):
    def __init__(self, function, *arguments):
        super().__init__(4, 4)
        self.function, self.arguments = function, arguments

    def forward(self, x):
        return self.function.apply(super().forward(x), *self.arguments)


class Buffered(nn.Linear):
    def __init__(self, function):
        super().__init__(4, 4)
        self.function = function
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        return self.function.apply(super().forward(x), self.mean)


def trained(model, x_of=lambda: torch.randn(6, 4)):
    for _ in range(6):
        model.zero_grad()
        model(x_of()).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    return [p.detach().clone() for p in model.parameters()]


def in_a_class():
    Noted.sizes = []
    return [*trained(Layer(Noted)), torch.tensor(Noted.sizes)]


def in_a_global_list():
    calls.clear()
    return [*trained(Layer(Called)), torch.tensor(calls)]


def in_an_object():
    meter = Meter()
    return [*trained(Layer(Metered, meter)), torch.tensor(meter.sizes)]


def in_a_tensor(function):
    mean = torch.zeros(())
    return [*trained(Layer(function, mean)), mean]


class Stepped(torch.autograd.Function):
    """Its backward makes the step of an optimizer."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        found = grad @ weight
        weight.data.sub_(0.1 * grad.T @ x)
        return found, None


class SteppedInPlace(Stepped):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        found = grad @ weight
        weight.sub_(0.1 * grad.T @ x)
        return found, None


class Stepping(nn.Linear):
    def __init__(self, function):
        super().__init__(4, 4)
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight) + self.bias


class Penalized(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        y.square().mean().backward(retain_graph=True)
        return y


def in_grads():
    model, found = Penalized(4, 4), []
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(6, 4))
        found.append(model.weight.grad.clone())
    return found


def in_a_parameter(function):
    model = Stepping(function)
    for _ in range(6):
        model(torch.randn(6, 4)).square().mean().backward()
    return [p.detach().clone() for p in model.parameters()]


def in_a_buffer(function):
    model = Buffered(function)
    return [*trained(model), model.mean]


class Branched(nn.Module):
    """A convolution, a norm and a way around them, whose parameters are in another order than their
    gradients are ready in."""

    def __init__(self):
        super().__init__()
        self.out, self.norm = nn.Linear(5, 2), nn.BatchNorm1d(5)
        self.inside, self.around = nn.Conv1d(3, 5, 3), nn.Conv1d(3, 5, 1)

    def forward(self, x):
        inside = self.norm(self.inside(x)).relu()
        return self.out(inside.mean(2) + self.around(x).mean(2))


class Tied(nn.Module):
    """Two of its layers are used twice, and others in between; their sums begin with the first use
    and with the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.fourth = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        earlier, later = self.first(x), self.first(self.second(x))
        before, after = self.third(x), self.third(self.fourth(x))
        return (earlier + later) * (after + before)


def hooked(register, make=Branched):
    model, called = make(), []
    for k, p in enumerate(model.parameters()):
        register(p, lambda grad, k=k: called.append(k))
        p.register_hook(lambda grad: grad + 0.01 * torch.randn_like(grad))
    found = trained(model, lambda: torch.randn(6, 3, 4))
    return [*found, torch.tensor(called)]


def hooked_nodes():
    """Hooks on the nodes that put gradients into `.grad`, before and after they do."""
    model, called, nodes = Branched(), [], []
    for k, p in enumerate(model.parameters()):
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: (grads[0] + 0.01 * torch.randn_like(grads[0]),))
        node.register_hook(lambda *_, k=k, p=p: called.append(k + p.grad.norm().item() / 100))
        nodes.append(node)
    found = trained(model, lambda: torch.randn(6, 3, 4))
    return [*found, torch.tensor(called)]


class Mixed(nn.Module):
    """Reads `weight` from outside of its parameters, or an argument that may come from them."""

    def __init__(self):
        super().__init__()
        self.p, self.out = nn.Parameter(torch.eye(4)), nn.Linear(4, 2)
        self.weight = None

    def forward(self, x):
        return self.out(x.tanh() @ (self.p if self.weight is None else self.weight))


class Counted(torch.autograd.Function):
    """Counts how often its backward is called."""

    calls: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Counted.calls.append(1)
        return grad


def computed_by_the_script(*, in_an_attribute):
    """What a script computes from a parameter before it calls the module, with all that a backward
    can leave there."""
    model, norms = Mixed(), []
    Counted.calls.clear()

    def step(x):
        weight = Counted.apply(nn.functional.normalize(model.p))
        weight.register_hook(lambda grad: norms.append(grad.norm().item()))
        weight.grad_fn.register_prehook(lambda grads: norms.append(grads[0].norm().item()))
        weight.retain_grad()
        model.weight = weight if in_an_attribute else None
        model(x if in_an_attribute else x @ weight).square().mean().backward()
        norms.append(weight.grad.norm().item())

    for _ in range(3):
        step(torch.randn(6, 4))
    return [torch.tensor(norms), torch.tensor(len(Counted.calls)), model.p.grad]


def asked_for_in_a_hook():
    """Gradients, of the loss whose backward calls the hook."""
    model, found = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), []
    for _ in range(6):
        model.zero_grad()
        scores = model(torch.randn(6, 4))
        loss = scores.square().mean()

        def ask(_, loss=loss, hooks=(hooks := [])):
            hooks.pop().remove()
            found.extend(torch.autograd.grad(loss, model.parameters(), retain_graph=True))

        hooks.append(scores.register_hook(ask))
        loss.backward(retain_graph=True)
        found.extend(p.grad.clone() for p in model.parameters())
    return found


def of_rows():
    """Gradients of several rows at once, by which the graph is freed, or kept."""
    model, found = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), []
    for _ in range(6):
        scores = model(torch.randn(6, 4))
        rows = torch.eye(3)[:, None].expand(3, 6, 3)
        for is_kept in (True, False):
            ask = functools.partial(torch.autograd.grad, retain_graph=is_kept)
            found += ask(scores, [*model.parameters()], rows, is_grads_batched=True)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(scores.sum(), model[0].weight)
    return found


HOOKED = {
    "hooks on gradients": lambda: hooked(torch.Tensor.register_hook),
    "hooks after accumulation": lambda: hooked(torch.Tensor.register_post_accumulate_grad_hook),
    "hooks on nodes": hooked_nodes,
    "hooks on tied weights": lambda: hooked(torch.Tensor.register_hook, Tied),
    "gradients, in a hook": asked_for_in_a_hook,
    "gradients of rows": of_rows,
}
CASES = {
    "a class": (in_a_class, 0),
    "a global list": (in_a_global_list, 6),
    "an object": (in_an_object, 0),
    "a tensor": (lambda: in_a_tensor(Averaged), 0),
    "a tensor's data": (lambda: in_a_tensor(AveragedData), 0),
    "a buffer": (lambda: in_a_buffer(Averaged), 0),
    "a buffer's data": (lambda: in_a_buffer(AveragedData), 0),
    "gradients, in a forward": (in_grads, 0),
    "a parameter": (lambda: in_a_parameter(SteppedInPlace), 0),
    "a parameter's data": (lambda: in_a_parameter(Stepped), 0),
    **{name: (case, 6) for name, case in HOOKED.items()},
    "an attribute's graph": (lambda: computed_by_the_script(in_an_attribute=True), 0),
    "an argument's graph": (lambda: computed_by_the_script(in_an_attribute=False), 3),
}


@ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_what_a_backward_keeps_is_as_in_one_process(name):
    case, divided_calls = CASES[name]
    torch.manual_seed(1)
    expected = case()
    torch.manual_seed(1)
    with sharding():
        found = case()
    assert modules.call_counts.sharded == divided_calls
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
