"""Scripts that hypothesis draws have the numbers of one process.

DRAWN_EXAMPLES sets how many: 5 on two or three ranks unless it says otherwise, and 200 on up to
seven at night (`make nightly`).
"""

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import instep
from oracle import same_as_one_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SIZES = [2, 3, 4, 7] if "DRAWN_EXAMPLES" in os.environ else [2, 3]
STEPS = 30
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, 3e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 3e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}
SCHEDULES = {
    "none": lambda o: lr_scheduler.ConstantLR(o, 1.0),
    "step": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
}


@dataclass(frozen=True)
class Script:
    """What a user might have written."""

    samples: int
    batch_size: int
    norm: bool
    dropout: float
    optimizer: str
    schedule: str
    accumulate: int
    no_sync: bool
    clip: bool
    shuffle: bool
    double: bool

    @property
    def dtype(self):
        return torch.float64 if self.double else torch.float32

    @property
    def last_batch(self):
        return self.samples % self.batch_size or self.batch_size


scripts = st.builds(
    Script,
    samples=st.integers(4, 40),
    batch_size=st.integers(1, 12),
    norm=st.booleans(),
    dropout=st.sampled_from([0.0, 0.0, 0.3]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    accumulate=st.integers(1, 3),
    no_sync=st.booleans(),
    clip=st.booleans(),
    shuffle=st.booleans(),
    double=st.booleans(),
)


def train(log, script):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(script.samples, 1, 5, 5, generator=generator, dtype=script.dtype)
    y = torch.randint(0, 4, (script.samples,), generator=generator)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=not script.norm),
        nn.BatchNorm2d(6) if script.norm else nn.Identity(),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(script.dropout),
        nn.Linear(54, 4),
    ).to(script.dtype)
    model = instep.replicate(model)
    log.begin(model)
    optimizer = OPTIMIZERS[script.optimizer](model.parameters())
    schedule = SCHEDULES[script.schedule](optimizer)
    loader = instep.shard(
        DataLoader(TensorDataset(x, y), script.batch_size, shuffle=script.shuffle)
    )
    steps = micro = 0
    while steps < STEPS:
        for inputs, targets in log.batches(loader):
            micro += 1
            last = micro % script.accumulate == 0
            loss = cross_entropy(model(inputs), targets) / script.accumulate
            log.loss(loss, len(inputs))
            if script.no_sync and not last:
                with instep.no_sync():
                    loss.backward()
                continue
            loss.backward()
            if not last:
                continue
            if script.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            log.step(optimizer, model)
            optimizer.zero_grad()
            schedule.step()
            steps += 1
            if steps == STEPS:
                return


@settings(
    max_examples=int(os.environ.get("DRAWN_EXAMPLES", "5")),
    deadline=None,
    derandomize="DRAWN_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(script=scripts, size=st.sampled_from(SIZES))
def test_a_drawn_script_has_the_numbers_of_one_process(script, size):
    # Batch statistics of very few values are ill-conditioned, in one process too.
    assume(not script.norm or min(script.last_batch, script.batch_size) >= 4)
    same_as_one_process(train, script, sizes=(size,), dtype=script.dtype, nudge=script.dropout > 0)
