"""Trainings on a real GPU, which two or three ranks share (shared_gpu.py): `make gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import instep
import pool
import test_exactness
import test_sharded_trainings
import test_simulated_jobs
import test_simulated_streams
from oracle import Log, same_as_one_process
from sharded_training import SHARDED, mlp, unedited
from test_simulated import AMP, EXPLICIT, INSIDE, OPTIMIZERS, check_replicas, dropped, large, waits
from test_simulated_streams import in_branches, in_one_stream, trainings, unedited_in_branches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here"),
]
TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _on_gpu() -> Iterator[None]:
    with pool.talking_over(pool.GPU):
        yield


# ------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", EXPLICIT)
def test_replicas_have_the_numbers_of_one_process(name: str) -> None:
    check_replicas(name)


@pytest.mark.parametrize("training", [dropped, large], ids=lambda training: training.__name__)
def test_noise_and_large_buckets_have_the_numbers_of_one_process(
    training: Callable[[Log], None],
) -> None:
    same_as_one_process(training, sizes=(2, 3), dtype=torch.float64, nudge=True)


OF_THE_CPU = {"draws_of_every_kind"}
"""Trainings with tensors of their own on the CPU."""
DRAWN_BY_CUDNN = {"dropout_inside_of_a_recurrent_layer"}
"""The layer is computed whole on every rank."""


def on_gpu(log: Log, name: str) -> None:
    with torch.device(pool.device()):  # where models and tensors are made
        training = getattr(test_sharded_trainings, name)
        unedited(log, training, is_sharded=name not in DRAWN_BY_CUDNN)


@pytest.mark.parametrize(
    "name", [each.__name__ for each in SHARDED if each.__name__ not in OF_THE_CPU]
)
def test_unedited_trainings_have_the_numbers_of_one_process(name: str) -> None:
    same_as_one_process(on_gpu, name, sizes=(2,), dtype=torch.float64, nudge=True)


@pytest.mark.parametrize("training", trainings(in_one_stream, in_branches, unedited_in_branches))
def test_trainings_that_use_streams_have_the_numbers_of_one_process(
    training: Callable[[Log], None],
) -> None:
    same_as_one_process(training, sizes=(2,), dtype=torch.float64, nudge=True)


# --------------------------------------------------------------------------------- graphs


class Graphed:
    """A forward and backward that become a CUDA graph after three steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.x = torch.empty(12, 6, dtype=torch.float64, device="cuda")
        self.y = torch.empty(12, dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self.side = torch.cuda.Stream()
        self.steps = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Leaves the gradient in `.grad`."""
        self.x[: len(x)].copy_(x)
        self.y[: len(y)].copy_(y)
        self.steps += 1
        if self.steps > 4:
            self.graph.replay()
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.optimizer.zero_grad()
            if self.steps == 4:
                with torch.cuda.graph(self.graph, stream=self.side):
                    self.compute(len(x))
                self.graph.replay()
            else:
                self.compute(len(x))
        torch.cuda.current_stream().wait_stream(self.side)

    def compute(self, count: int) -> None:
        F.cross_entropy(self.model(self.x[:count]), self.y[:count]).backward()


def graphed(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8)).double().cuda()
    loader = DataLoader(test_exactness.rows(96, classes=3), 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    log.begin(model)
    step = Graphed(model, optimizer)
    for x, y in log.batches(loader):
        step(x.cuda(), y.cuda())
        log.step(optimizer, model)


def unedited_graphed(log: Log) -> None:
    unedited(log, graphed, is_sharded=None)


def test_a_captured_step_has_the_numbers_of_one_process() -> None:
    same_as_one_process(unedited_graphed, sizes=(2,), dtype=torch.float64, nudge=True)


def a_captured_replica() -> None:
    model = instep.replicate(mlp().double().cuda())
    step = Graphed(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = torch.randn(12, 6).double().cuda(), torch.zeros(12, dtype=torch.int64).cuda()
    with warnings.catch_warnings(action="ignore"):  # the graph is empty
        for _ in range(3):
            step(x, y)
        with pytest.raises(instep.errors.CapturedStepError):
            step(x, y)


def test_a_captured_step_of_a_replica_is_refused() -> None:
    pool.run(2, a_captured_replica)


# ---------------------------------------------------------------------- what the host waits for


@pytest.mark.parametrize(
    ("name", "door"),
    [
        (name, door)
        for name in (*OPTIMIZERS, *AMP, INSIDE)
        for door in ("explicit", "unedited")
        if (name, door) != ("divided", "unedited")
    ],
)
def test_in_a_step_the_host_waits_for_nothing(name: str, door: str) -> None:
    """PyTorch's own waits do not count."""
    for found in pool.run(2, waits, name, door):
        assert found[4:] == [[]] * 2


# ------------------------------------------------------------------------------- what surrounds it


@pytest.mark.parametrize(
    "body",
    [
        test_simulated_jobs.collectives_and_trainings_of_the_self_test,
        test_simulated_jobs.tensors_of_another_device,
        test_simulated_jobs.metrics_stay_on_the_device,
        test_simulated_jobs.collectives_by_name,
        test_simulated_jobs.scaled_by_levels,
        test_simulated_jobs.a_divergence_is_found,
        test_simulated_streams.backward_of_several_streams,
        test_simulated_streams.submitted_by_name_from_a_stream,
    ],
    ids=lambda body: body.__name__,
)
def test_on_two_ranks(body: Callable[[], None]) -> None:
    pool.run(2, body)


def test_a_checkpoint_has_the_devices_generator_and_resumes_to_the_bit(tmp_path: Path) -> None:
    trained = test_simulated_jobs.trained
    whole = pool.run(2, trained, str(tmp_path / "whole"), 5)
    pool.run(2, trained, str(tmp_path / "parts"), 2)
    rest = pool.run(2, trained, str(tmp_path / "parts"), 5)
    for rank in range(2):
        for mine, expected in zip(rest[rank], whole[rank], strict=True):
            assert all(map(torch.equal, mine, expected))


# ------------------------------------------------------------------------- unedited scripts

SITE = f"""
import os, sys
if "RANK" in os.environ:
    sys.path.insert(0, {str(TESTS)!r})
    import shared_gpu
    shared_gpu.install(int(os.environ["RANK"]))
"""
"""Python runs it at the start of each process: the ranks of `instep run` share the GPU."""
IMAGES = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.randn(96, 3, 16, 16)
labels = images.mean((1, 2, 3)).mul(60).clamp(-1, 1).add(1).round().long()
loader = DataLoader(TensorDataset(images, labels), 16, shuffle=True, pin_memory=True)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1),
    nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    nn.Dropout(0.2), nn.Linear(128, 3),
)
"""
WORDS = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
words = torch.randint(50, (24, 8, 17))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 50)
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.encoder(self.embedding(x), mask, is_causal=True))
net = Model()
"""
COMPILED = (
    IMAGES
    + """
net = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.GELU(), nn.Linear(64, 3)).cuda()
net = torch.compile(net, mode="MODE")
optimizer = torch.optim.SGD(net.parameters(), 0.05)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(net(x.cuda()), y.cuda()).backward()
    optimizer.step()
"""
)
GRAPH = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
x = torch.randn(300, 16, device="cuda")
edges = torch.randint(300, (2, 1501), device="cuda")
y = torch.randint(4, (300,), device="cuda")
class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
    def forward(self, x, edges):
        sums = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        return self.own(x) + self.others(sums)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Layer(16, 32), Layer(32, 4)
    def forward(self, x, edges):
        x = F.dropout(self.first(x, edges).tanh(), 0.2, self.training)
        return self.last(x, edges)
"""
SCRIPTS = {
    "float32, with TF32": IMAGES
    + """
torch.backends.cudnn.benchmark = True
net.cuda().train()
optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f}")
""",
    "channels last, float16 with a scaler": IMAGES
    + """
net.cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
scaler = torch.amp.GradScaler()
for epoch in range(2):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True).to(memory_format=torch.channels_last), y.cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
    "a transformer in bfloat16": WORDS
    + """
net.cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=24)
for batch in words.cuda():
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    schedule.step()
""",
    "a transformer in float32": WORDS
    + """
net.cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for batch in words.cuda():
    optimizer.zero_grad()
    F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
""",
    "messages between the rows": GRAPH
    + """
net = Model().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(12):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x, edges), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.3f}")
""",
    "messages between the rows, compiled": GRAPH
    + """
net = torch.compile(Model().cuda())
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(12):
    optimizer.zero_grad()
    F.cross_entropy(net(x, edges), y).backward()
    optimizer.step()
""",
    "bags of words": """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(200, 32, mode="mean"), nn.Linear(32, 2)
    def forward(self, words, offsets):
        return self.head(self.bags(words, offsets).tanh())
net = Model().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(24):
    lengths = torch.randint(1, 9, (40,))
    words = torch.randint(200, (int(lengths.sum()),))
    offsets = lengths.cumsum(0) - lengths
    labels = (words[offsets] > 100).long()
    optimizer.zero_grad()
    loss = F.cross_entropy(net(words.cuda(), offsets.cuda()), labels.cuda())
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.3f}")
""",
    "compiled": COMPILED.replace("MODE", "default"),
    "compiled to graphs": COMPILED.replace("MODE", "reduce-overhead"),
    "a graph of the step": IMAGES
    + """
net = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.GELU(), nn.Linear(64, 3)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.05)
x, y = images[:16].cuda(), labels[:16].cuda()
def step():
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for images, labels in loader:
    x.copy_(images)
    y.copy_(labels)
    graph.replay()
torch.cuda.synchronize()
print(f"{loss.item():.3f}")
""",
}


@pytest.mark.launch
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SCRIPTS)
def test_unedited_scripts_are_the_same_on_two_ranks(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[name])
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "verify", "-n", "1,2", str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0
    assert "SAME" in ran.stdout
