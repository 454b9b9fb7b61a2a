"""torch._dynamo is imported when something is compiled, and nothing else changes."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from instep.launch.worker import torch_import

SCRIPT = """
import json, sys
import torch
from torch.optim.optimizer import _use_grad_for_differentiable

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
rows = torch.randn(6, 4)
optimizers = [
    torch.optim.Adam(model.parameters(), foreach=False),
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, differentiable=False),
]
modes = []

@torch._disable_dynamo
def double(tensor):
    return tensor * 2

class Noting(torch.optim.SGD):
    @_use_grad_for_differentiable
    def step(self):
        "Note whether gradients are recorded."
        modes.append(torch.is_grad_enabled())

def step():
    for optimizer in optimizers:
        optimizer.zero_grad()
        double(model(rows)).square().sum().backward(torch.tensor(0.5))
        optimizer.step()

for differentiable in (False, True):
    Noting([torch.zeros(1, requires_grad=True)], differentiable=differentiable).step()
modes.append(torch.is_grad_enabled())
for _ in range(3):
    step()
imported = not {"torch._dynamo", "sympy"}.isdisjoint(sys.modules)
graphs = []

def backend(graph, inputs):
    graphs.append([node.name for node in graph.graph.nodes])
    return graph.forward

for _ in range(2):
    torch.compile(step, backend=backend)()
    step()
print(json.dumps([imported, [modes, Noting.step.__doc__, graphs, model.weight.tolist()]]))
"""


def run_python(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=100
    )
    return json.loads(done.stdout)


@pytest.mark.nightly
@pytest.mark.launch
def test_no_optimizer_imports_it_and_results_and_graphs_are_those_of_plain_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    imported, plain = run_python(script)
    imported_by_instep, instep = run_python("-m", "instep", "run", "-n", "1", script)
    assert imported
    assert not imported_by_instep
    assert instep == plain
    assert plain[2]


ASKS_FOR_MODULES = """
import inspect, sys

def called():
    return inspect.getmodule(sys._getframe())

before = len(inspect.modulesbyfile)
found = called().__name__, inspect.getmodule(called).__name__, len(inspect.modulesbyfile) - before
own = {"inspect": inspect, "sys": sys}
exec("found = inspect.getmodule(sys._getframe())", own)
in_no_module = own["found"]
"""
IMPORTS = """
import inspect, json, sys
from instep.launch.worker import torch_import
torch_import.prepare()
import torch, library
print(json.dumps([[library.found, library.in_no_module], [torch.found, torch.in_no_module]]))
"""


def test_the_module_of_a_frame_is_found_without_a_look_at_the_files_of_all(tmp_path):
    for name in ("torch", "library"):
        (tmp_path / f"{name}.py").write_text(ASKS_FOR_MODULES)
    (tmp_path / "script.py").write_text(IMPORTS)
    assert run_python(tmp_path / "script.py") == [
        [[name, name, 0], None] for name in ("library", "torch")
    ]


SCALAR, VECTOR, COMPLEX = (
    torch.ones(shape, dtype=dtype, requires_grad=True)
    for shape, dtype in (((), None), ((3,), None), ((3,), torch.complex64))
)


@pytest.mark.parametrize(
    ("outputs", "grads", "is_compared"),
    [
        ((SCALAR, VECTOR), (torch.ones(()), torch.ones(3)), False),
        ((VECTOR,), [torch.ones(3, dtype=torch.float64)], False),
        ((VECTOR,), (torch.ones(2),), True),
        ((COMPLEX,), (torch.ones(3),), True),
        ((SCALAR, VECTOR), (None, torch.ones(3)), True),
        ((VECTOR,), (None,), True),
        ((SCALAR,), (torch.ones(()), torch.ones(())), True),
        ((get_gradient_edge(VECTOR * 2),), (torch.ones(3),), True),
    ],
)
def test_gradients_that_fit_are_taken_without_an_import_of_symbolic_shapes(
    monkeypatch, outputs, grads, is_compared
):
    compared = []

    def make_grads(*arguments):
        compared.append(arguments)
        return torch.autograd._make_grads(*arguments)

    def outcome(make):
        try:
            return [None if each is None else each.tolist() for each in make(outputs, grads, False)]
        except RuntimeError as error:
            return str(error)

    monkeypatch.setattr(torch_import, "after_import", lambda *_: None)
    module = SimpleNamespace(_make_grads=make_grads)
    torch_import._defer_in_make_grads(module)
    assert outcome(module._make_grads) == outcome(torch.autograd._make_grads)
    assert bool(compared) == is_compared


REPLICATED = """
import json, sys, torch, instep
layers = torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout()
model = instep.replicate(torch.nn.Sequential(*layers))
model(torch.ones(3, 4)).sum().backward()
imported = ["torch._dynamo" in sys.modules]
torch.compile(model, backend="eager")(torch.ones(3, 4)).sum().backward()
print(json.dumps([*imported, "torch._dynamo" in sys.modules]))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_replica_does_not_import_it_without_a_launcher_of_insteps_either(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(REPLICATED)
    assert run_python(script) == [False, True]
