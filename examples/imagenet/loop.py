"""The training loop, written for one process. `Ranks` holds the differences between the ways."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from records import Clock, Records


@dataclass(frozen=True)
class Ranks:
    """The number of this process, and a function that sums over all processes."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = lambda sums: sums


class Means(NamedTuple):
    """Means over all samples of all ranks; accuracies are fractions."""

    loss: float
    top1: float
    top5: float
    samples: int


def sgd(model: nn.Module, args: Namespace) -> SGD:
    return SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.wd)


def fit(
    args: Namespace,
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer,
    train: Any,
    val: Any,
    ranks: Ranks = Ranks(),
    backward: Callable[[Tensor], object] = Tensor.backward,
    also: Mapping[str, Any] | None = None,
) -> Means:
    """Train for args.epochs epochs, validate after each; return the last validation's means.

    `also` is what else has a state to save and to load.

    Rank 0 writes to args.out: last.pt after every epoch, best.pt after those that had the highest
    top-1 so far, epochs.csv, ranks.csv. Raises SystemExit for a checkpoint of another architecture.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and half(device) == torch.float16)
    kept = {"model": bare(model), "optimizer": optimizer, "scaler": scaler, **(also or {})}
    start, best = resumed(args, kept, device) if args.resume else (0, -1.0)
    if args.evaluate:
        means = validate(args, device, model, val, ranks)
        if ranks.rank == 0:
            print(said("validated", means), flush=True)
        return means
    records = Records(args, ranks, len(train), anew=start == 0)
    means = Means(0.0, 0.0, 0.0, 0)
    for epoch in range(start, args.epochs):
        train.dataset.epoch = epoch
        train.sampler.set_epoch(epoch)
        clock = Clock()
        sums = train_epoch(args, device, model, optimizer, train, scaler, backward, records, clock)
        trained = means_of(ranks.total(sums))
        timings = clock.timings(ranks, parameters=sum(p.numel() for p in model.parameters()))
        means = validate(args, device, model, val, ranks)
        if ranks.rank == 0:
            print(said(f"epoch {epoch + 1}", means), flush=True)
            records.epoch(epoch, trained, means, timings)
            save(args, epoch + 1, kept, max(best, means.top1), better=means.top1 > best)
        best = max(best, means.top1)
    records.close()
    return means


def train_epoch(
    args: Namespace,
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    scaler: torch.amp.GradScaler,
    backward: Callable[[Tensor], object],
    records: Records,
    clock: Clock,
) -> Tensor:
    """Return this rank's sums, as `counted`."""
    model.train()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for step, (images, target) in enumerate(clock.waiting(loader)):
        set_rate(args, optimizer, loader.dataset.epoch, step / len(loader))
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with casting(args, device):
            output = model(images)
            loss = cross_entropy(output, target)
        optimizer.zero_grad()
        backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        sums += counted(output.detach(), target, loss.detach())
        clock.samples += len(target)
        records.step(loader.dataset.epoch, step, sums, clock)
    return sums


@torch.no_grad()
def validate(
    args: Namespace, device: torch.device, model: nn.Module, loader: Iterable[Any], ranks: Ranks
) -> Means:
    """Sum over the validation set. Every image counts once, on one of the ranks."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        with casting(args, device):
            output = model(images)
        sums += counted(output, target, cross_entropy(output, target))
    return means_of(ranks.total(sums))


def counted(output: Tensor, target: Tensor, loss: Tensor) -> Tensor:
    """The sums of losses, of hits among the first one and the first five, and of samples."""
    hits = output.topk(min(5, output.shape[1]), dim=1).indices == target.unsqueeze(1)
    samples = torch.full_like(loss, len(target), dtype=torch.float64)
    return torch.stack([loss * samples, hits[:, 0].sum(), hits.sum(), samples])


def means_of(sums: Tensor) -> Means:
    loss, top1, top5, samples = sums.tolist()
    return Means(loss / samples, top1 / samples, top5 / samples, round(samples))


def said(what: str, means: Means) -> str:
    top1, top5 = (round(part * means.samples) for part in (means.top1, means.top5))
    return (
        f"{what}: loss {means.loss:.4f}  top-1 {means.top1:.2%} ({top1} of {means.samples})  "
        f"top-5 {means.top5:.2%} ({top5})"
    )


def set_rate(args: Namespace, optimizer: Optimizer, epoch: int, passed: float) -> None:
    """The learning rate of this step; `passed` is the finished fraction of the epoch."""
    rate = args.lr * 0.1 ** (epoch // 30)
    if args.linear_scaling:
        rate *= args.batch_size / 256
    if epoch + passed < args.warmup:
        rate *= (epoch + passed) / args.warmup
    for group in optimizer.param_groups:
        group["lr"] = rate


def casting(args: Namespace, device: torch.device) -> AbstractContextManager[None]:
    """Autocast if args ask for it. Autocast with enabled=False would switch off Apex's."""
    return torch.autocast(device.type, half(device)) if args.amp else nullcontext()


def half(device: torch.device) -> torch.dtype:
    old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if old else torch.bfloat16


def bare(model: nn.Module) -> nn.Module:
    """The module inside of a DataParallel or a DistributedDataParallel."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def save(
    args: Namespace, epochs: int, kept: Mapping[str, Any], best: float, *, better: bool
) -> None:
    """Write last.pt, and best.pt if this epoch is the best. Each write is atomic."""
    state = {"arch": args.arch, "epochs": epochs, "best_top1": best}
    state |= {name: part.state_dict() for name, part in kept.items()}
    for name in ("last.pt", "best.pt") if better else ("last.pt",):
        path = args.out / name
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


def resumed(args: Namespace, kept: Mapping[str, Any], device: torch.device) -> tuple[int, float]:
    """Load args.resume; return the number of its epochs, and its best top-1."""
    if not Path(args.resume).is_file():
        raise SystemExit(f"--resume {args.resume}: there is no such file.")
    state = torch.load(args.resume, map_location=device, weights_only=True)
    if state["arch"] != args.arch:
        raise SystemExit(
            f"--resume {args.resume} is a checkpoint of {state['arch']}, but -a says {args.arch}."
        )
    for name, part in kept.items():
        if name == "model" or not args.evaluate:
            part.load_state_dict(state[name])
    return state["epochs"], state["best_top1"]
