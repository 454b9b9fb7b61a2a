"""Unedited scripts that compile something, at several ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_unedited_world import RUN, Place

pytestmark = [pytest.mark.slow, pytest.mark.launch]

FUNCTION = """
import torch
from torch import nn

torch.manual_seed(0)

@torch.compile(backend="aot_eager")
def mixed(q, k, v):
    return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(mixed(*self.inner(x).chunk(3, -1)).mean(1))

net = Model()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = net(torch.randn(8, 5, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
"""


@pytest.mark.nightly
def test_a_model_that_calls_a_compiled_function_is_divided(tmp_path: Path) -> None:
    place = Place(tmp_path)
    script = place.script(FUNCTION)
    plain = place.run("plain", sys.executable, script)
    two = place.run("two", *RUN, "2", script)
    assert two.stdout == plain.stdout
    assert "whole" not in two.stderr


STEP = """
import torch

weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.Adam([weight], torch.tensor(0.1))

@torch.compile(backend="eager")
def step():
    optimizer.step()

torch._dynamo.config.error_on_recompile = True
for _ in range(4):
    weight.grad = torch.ones(3)
    step()
print(torch._functorch.config.donated_buffer, torch.compiler.config.cache_key_tag)
"""


@pytest.mark.nightly
def test_what_is_compiled_can_run_backward_twice_and_an_optimizer_step_is_compiled_once(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    two = place.run("two", *RUN, "2", place.script(STEP), TORCH_COMPILE_CACHE_KEY_TAG="own,")
    assert two.stdout == "False own,no donated buffers\n", two.stderr
    assert "Dynamo" not in two.stderr


BLOCK = """
import torch
from torch import nn

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(50, 16), Block()
    def forward(self, words):
        return self.block(self.embedding(words))

net = Model()
net.block.compile()
net(torch.randint(50, (9, 12))).square().sum().backward()
for parameter in net.parameters():
    print(f"{parameter.grad.norm().item():.3f}")
"""


DROPOUT = """
import sys
import torch
from torch import nn

if sys.argv[1] == "as without it":
    torch._inductor.config.fallback_random = True
torch.manual_seed(0)

@torch.compile
def activation(x):
    return nn.functional.dropout(x.relu(), 0.5)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        return self.outer(activation(self.inner(x)))

net = Model()
for step in range(3):
    net(torch.randn(9, 8)).square().mean().backward()
for parameter in net.parameters():
    print(f"{parameter.grad.norm().item():.3f}")
"""


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["as compiled", "as without it"])
def test_what_compiled_code_draws_is_that_of_one_process(tmp_path: Path, how: str) -> None:
    place = Place(tmp_path)
    script = place.script(DROPOUT)
    same = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    plain = place.run("plain", sys.executable, script, how, **same)
    two = place.run("two", *RUN, "2", script, how, **same)
    assert two.stdout == plain.stdout
    told = "what torch.compile has made of it draws by a row's place in the batch"
    assert (told in two.stderr) == (how == "as compiled"), two.stderr


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_what_the_cache_on_disk_has_from_plain_python_does_not_change_gradients(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    script = place.script(BLOCK)
    same = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    plain = place.run("plain", sys.executable, script, **same)
    two = place.run("two", *RUN, "2", script, **same)
    assert two.stdout == plain.stdout
