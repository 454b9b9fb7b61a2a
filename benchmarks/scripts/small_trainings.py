"""Single-process trainings of several kinds: prints the median seconds of a step, and a digest of
the parameters, buffers and optimizer states that it ends with.

    python small_trainings.py NAME STEPS
"""

import hashlib
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import Transformer, mlp, resnet18

FIRST = 5  # steps that are not timed: the first ones are compared with the whole forward
name, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(64, 96, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(96, 10)

    def forward(self, x, state):
        y, state = self.cells(x, state)
        return self.head(y[:, -1]), state


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(144, 10),
    )  # fmt: skip


def digits(batch):
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return DataLoader(
        TensorDataset(images, torch.tensor(data.target)), batch_size=batch, shuffle=True
    )


def endless(loader):
    while True:
        yield from loader


def random_batches(inputs, targets, batch):
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch, shuffle=True)
    return endless(loader)


def supervised(model, optimizer, batches, every=1, half=False, clip=None):
    def step():
        for _ in range(every):
            x, y = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = F.cross_entropy(model(x), y) / every
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, [model], [optimizer]


def of_digits(every=1, half=False, batch=50):
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return supervised(model, optimizer, endless(digits(batch)), every, half)


def of_resnet18(pixels=64, batch=64):
    model = resnet18(10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    images, labels = torch.randn(256, 3, pixels, pixels), torch.randint(0, 10, (256,))
    return supervised(model, optimizer, random_batches(images, labels, batch))


def of_transformer():
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    tokens = torch.randint(0, 1000, (256, 65))
    batches = random_batches(tokens[:, :-1], tokens[:, 1:], 32)
    return supervised(model, optimizer, batches, clip=1.0)


def of_mlp():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return supervised(
        model, optimizer, random_batches(torch.randn(512, 512), torch.randint(0, 1000, (512,)), 64)
    )


def of_dcgan():
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 2, 2), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 32, 4, 2), nn.BatchNorm2d(32), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.Linear(288, 1),
    )  # fmt: skip
    optimizers = [
        torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in (critic, generator)
    ]
    batches, loss = endless(digits(50)), F.binary_cross_entropy_with_logits

    def step():
        real, _ = next(batches)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 32, 1, 1))
        critic.zero_grad()
        loss(critic(real), ones).backward()
        loss(critic(fake.detach()), zeros).backward()
        optimizers[0].step()
        generator.zero_grad()
        loss(critic(fake), ones).backward()
        optimizers[1].step()

    return step, [generator, critic], optimizers


def of_gru():
    model, state = Recurrent(), None
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    batches = random_batches(torch.randn(320, 16, 64), torch.randint(0, 10, (320,)), 32)

    def step():
        nonlocal state
        x, y = next(batches)
        state = torch.zeros(2, len(x), 96) if state is None else state.detach()
        scores, state = model(x, state)
        optimizer.zero_grad()
        F.cross_entropy(scores, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return step, [model], [optimizer]


TRAININGS = {
    "digits": of_digits,
    "resnet18": of_resnet18,
    "small resnet18": lambda: of_resnet18(32, 16),
    "transformer": of_transformer,
    "mlp": of_mlp,
    "dcgan": of_dcgan,
    "gru": of_gru,
    "accumulation": lambda: of_digits(every=3),
    "bfloat16": lambda: of_digits(half=True),
    "few rows": lambda: of_digits(batch=5),
}
step, models, optimizers = TRAININGS[name]()
seconds = []
for _ in range(steps):
    start = perf_counter()
    step()
    seconds.append(perf_counter() - start)
digest = hashlib.sha256()
for model in models:
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
for optimizer in optimizers:
    for state in optimizer.state.values():
        for tensor in state.values():
            if torch.is_tensor(tensor):  # RMSprop and SGD keep None, too
                digest.update(tensor.contiguous().numpy().tobytes())
print(statistics.median(seconds[FIRST:] or seconds), digest.hexdigest())
