"""Train small models on all ranks, and compare with one process on the whole batch. Collective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from instep.distributed.communication.collectives import all_reduce
from instep.distributed.rendezvous import bootstrap
from instep.process import settings
from instep.training.replicas import replicate
from instep.training.shards import shard

Batches = list[tuple[Tensor, Tensor]]
_ROWS, _BATCH, _CLASSES = 46, 12, 4
"""The last batch of each epoch has 10 rows, which 4 ranks cannot share equally."""
_EXACT, _ROUNDED = 1e-3, 5e-2
"""Largest differences: of float32, whose sums devices round in their own ways, and of 16 bits."""


@dataclass(frozen=True)
class TrainingResult:
    """What came of a training."""

    name: str
    verdict: str
    """"ok", or what is wrong."""
    difference: float
    """To one process: that of parameters and buffers, over their norm; the largest of all ranks."""
    seconds: float


def run_trainings(device: torch.device) -> list[TrainingResult]:
    """Train each model in a world of one and then on all ranks; ends with the first error."""
    found: list[TrainingResult] = []
    for name, (train, largest) in TRAININGS.items():
        begun, difference = time.perf_counter(), 0.0
        try:
            with bootstrap.world_of_one("the self-test"):
                alone = _play(train, device)
            together = _play(train, device)
            difference = _difference(alone, together)
            verdict = "ok" if difference <= largest else f"DIFFERS BY MORE THAN {largest:g}"
        except Exception as error:  # any error is a result here
            verdict = f"{type(error).__name__}: {error}"
        found.append(TrainingResult(name, verdict, difference, time.perf_counter() - begun))
        if verdict != "ok":
            break  # the ranks may be out of step now
    return found


def _play(train: Callable[[torch.device], list[nn.Module]], device: torch.device) -> Tensor:
    torch.manual_seed(0)
    return torch.cat(
        [
            value.detach().cpu().double().flatten()
            for model in train(device)
            for value in model.state_dict().values()
            if value.is_floating_point()
        ]
    )


def _difference(alone: Tensor, together: Tensor) -> float:
    """The largest over all ranks; infinite where something is not finite."""
    distance = (together - alone).norm() / alone.norm()
    distance = torch.where(distance.isfinite(), distance, torch.inf)
    return float(all_reduce(distance, "max"))


def _batches(device: torch.device, *shape: int, epochs: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of each batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_ROWS, *shape, generator=generator, device="cpu")
    y = torch.randint(_CLASSES, (_ROWS,), generator=generator, device="cpu")
    loader = shard(DataLoader(TensorDataset(x, y), _BATCH))
    for _ in range(epochs):
        for rows, labels in loader:
            yield rows.to(device), labels.to(device)


def _classify(
    device: torch.device,
    *layers: nn.Module,
    shape: tuple[int, ...] = (6,),
    cast: torch.dtype | None = None,
    epochs: int = 2,
) -> list[nn.Module]:
    model = replicate(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=cast is torch.float16)
    for x, y in _batches(device, *shape, epochs=epochs):
        optimizer.zero_grad()
        with _autocast(device, cast):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [model]


def _autocast(device: torch.device, cast: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if cast is None else torch.autocast(device.type, dtype=cast)


def _sums(device: torch.device) -> list[nn.Module]:
    return _classify(device, nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, _CLASSES))


def _batch_normalisation(device: torch.device) -> list[nn.Module]:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return _classify(device, *layers, nn.Linear(4 * 36, _CLASSES), shape=(1, 8, 8))


def _dropout(device: torch.device) -> list[nn.Module]:
    return _classify(device, nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, _CLASSES))


def _mixed_precision(device: torch.device) -> list[nn.Module]:
    """float16 with a scaler on accelerators, bfloat16 on CPUs."""
    cast = torch.bfloat16 if device.type == "cpu" else torch.float16
    layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, _CLASSES)
    return _classify(device, *layers, cast=cast)


def _overlap(device: torch.device) -> list[nn.Module]:
    """Several buckets are on their way while backward goes on."""
    with _buckets_of_1_mib():
        hidden = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())]
        ends = nn.Linear(6, 512), nn.Linear(512, _CLASSES)
        return _classify(device, ends[0], *hidden, ends[1], epochs=1)


@contextmanager
def _buckets_of_1_mib() -> Iterator[None]:
    name = settings.BUCKET_MIB.name
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _two_models(device: torch.device) -> list[nn.Module]:
    """A generator and a critic, in turns."""
    maker = replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(device))
    critic = replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device))
    of_maker = torch.optim.SGD(maker.parameters(), 0.05)
    of_critic = torch.optim.SGD(critic.parameters(), 0.05)
    for x, _ in _batches(device, 6):
        of_critic.zero_grad()
        F.softplus(-critic(x)).mean().backward()
        of_critic.step()
        of_maker.zero_grad()
        F.softplus(-critic(maker(x))).mean().backward()
        of_maker.step()
    return [maker, critic]


TRAININGS: dict[str, tuple[Callable[[torch.device], list[nn.Module]], float]] = {
    "sums of gradients": (_sums, _EXACT),
    "batch normalisation": (_batch_normalisation, _EXACT),
    "dropout": (_dropout, _EXACT),
    "mixed precision": (_mixed_precision, _ROUNDED),
    "overlap": (_overlap, _EXACT),
    "two models": (_two_models, _EXACT),
}
"""What is trained, and the largest difference to one process."""
