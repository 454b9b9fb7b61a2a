"""Unedited models and loops that hypothesis draws have the numbers of one process.

DRAWN_LOOPS sets how many: 6 unless it says otherwise, 300 at night (`make nightly`).
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from instep.distributed import one_copy
from instep.process.patching import PatchHandle
from instep.training.buckets import in_place_bucket
from instep.unedited.patch_table import OPTIMIZER_PATCHES, SHARDED_CALL_PATCHES
from instep.unedited.sharded_call import modules
from oracle import Log, same_as_one_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Config(dict):
    """As of a library whose attributes are its keys, and which forbids changes by methods."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def clear(self) -> None:
        raise TypeError("read only")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("read only")

    pop = __delitem__ = clear


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


class Cache:
    """What a forward is given and changes, and nobody can look into."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


@dataclass(frozen=True)
class Loop:
    """What a user might have written."""

    layer: str
    change: str
    """What begins to couple the rows, or to scale them, in step `at`."""
    at: int
    keeps: str
    given: str
    returns: str
    hook: str
    checkpoint: str
    noise: str
    grads: str
    optimizer: str
    accumulate: int
    rows: int
    ragged: bool


loops = st.builds(
    Loop,
    layer=st.sampled_from(["none", "batch norm", "layer norm", "dropout", "lstm", "made"]),
    change=st.sampled_from(["none", "flag couples", "flag scales", "epoch couples", "weight"]),
    at=st.integers(1, 9),
    keeps=st.sampled_from(["nothing", "list", "dict", "meter", "count", "buffer", "tensor"]),
    given=st.sampled_from(["tensor", "dataclass", "dict", "config", "cache", "keyword"]),
    returns=st.sampled_from(["tensor", "dict", "tuple", "loss", "masked loss"]),
    hook=st.sampled_from(["none", "forward", "forward pre", "backward"]),
    checkpoint=st.sampled_from(["none", "none", "reentrant", "plain"]),
    noise=st.sampled_from(["none", "like", "shape", "randint"]),
    grads=st.sampled_from(["none", "zero", "detach", "views", "clip"]),
    optimizer=st.sampled_from(["SGD", "Adam"]),
    accumulate=st.integers(1, 2),
    rows=st.sampled_from([4, 7, 8, 12]),
    ragged=st.booleans(),
)


class Model(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.config = loop, Config(width=8, depth=2)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        layers = {"batch norm": nn.BatchNorm1d(8), "layer norm": nn.LayerNorm(8)}
        layers |= {"dropout": nn.Dropout(0.3), "lstm": nn.LSTM(8, 8, batch_first=True)}
        self.layer = layers.get(loop.layer)
        self.register_buffer("total", torch.zeros(8))
        self.flag, self.kept, self.meter, self.count = False, [], {"sum": 0.0}, 0
        self.last: Tensor | None = None

    def forward(
        self, given: Any, epoch: int = 0, weight: float = 1.0, cache: Cache | None = None
    ) -> Any:
        loop = self.loop
        x = given.x * given.scale if isinstance(given, Batch) else given
        x = x["x"] if isinstance(x, dict) else x
        h = self.first(x)
        h = self._keep(self._add_noise(self._middle(h)))
        if (loop.change == "flag couples" and self.flag) or (
            loop.change == "epoch couples" and epoch > loop.at
        ):
            h = h - h.mean(0)
        if loop.change == "flag scales" and self.flag:
            h = 0.5 * h
        if cache is not None:
            cache.seen.append(h.detach())
            h = h + cache.seen[-1].mean() * len(cache.seen)
        out = self._run(self.second, torch.tanh(h) * weight)
        if loop.returns == "dict":
            return {"logits": out, "hidden": h}
        if loop.returns == "loss":
            return out.pow(2).mean(), out
        if loop.returns == "masked loss":
            kept = x[:, 0] > 0
            return (out.pow(2).mean(1) * kept).sum() / kept.sum().clamp(min=1), out
        return (out, h) if loop.returns == "tuple" else out

    def _run(self, part: nn.Module, x: Tensor) -> Tensor:
        if self.loop.checkpoint == "none" or not self.training:
            return part(x)
        # By its module, as a script that is imported after the patches finds it.
        return torch.utils.checkpoint.checkpoint(
            part, x, use_reentrant=self.loop.checkpoint == "reentrant"
        )

    def _middle(self, h: Tensor) -> Tensor:
        if self.loop.layer == "lstm":
            return self.layer(h.unsqueeze(1))[0].squeeze(1)
        if self.loop.layer == "made":
            return nn.Softplus()(h) + nn.LayerNorm(8, dtype=h.dtype)(h)
        return h if self.layer is None else self.layer(h)

    def _add_noise(self, h: Tensor) -> Tensor:
        if self.loop.noise == "like":
            return h + 0.1 * torch.randn_like(h)
        if self.loop.noise == "shape":
            return h + 0.1 * torch.randn(h.shape[0], 8, dtype=h.dtype)
        if self.loop.noise == "randint":
            return h[:, torch.randint(8, (8, 4))].sum(-1)
        return h

    def _keep(self, h: Tensor) -> Tensor:
        keeps, mean = self.loop.keeps, h.detach().mean()
        if keeps == "list":
            self.kept.append(mean.item())
        elif keeps == "dict":
            self.meter["sum"] = self.meter["sum"] + mean.item()
        elif keeps == "meter":
            self.meter.setdefault("rows", []).append(len(h))
        elif keeps == "count":
            self.count += len(h)
        elif keeps == "buffer":
            self.total += h.detach().sum(0)
        elif keeps == "tensor":
            self.last = h.detach()
        return h

    def told(self) -> float:
        """What a script would print of what forward has kept."""
        rows = sum(self.meter.get("rows", ()))
        last = 0.0 if self.last is None else self.last.sum().item()
        return 0.01 * (sum(self.kept) + self.meter["sum"] + rows + self.count + last)


def attach(loop: Loop, model: Model) -> None:
    if loop.hook == "forward":
        model.first.register_forward_hook(lambda module, args, out: out * 1.1)
    elif loop.hook == "forward pre":
        model.first.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
    elif loop.hook == "backward":
        model.second.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))


def train(log: Log, loop: Loop) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model(loop).double()
    attach(loop, model)
    log.begin(model)
    parameters = list(model.parameters())
    if loop.grads == "views":
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        parts = flat.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)
    optimizer = getattr(torch.optim, loop.optimizer)(parameters, 1e-2)
    cache = Cache()
    for step in range(12):
        for micro in range(loop.accumulate):
            rows = loop.rows - (loop.ragged and step % 3 == 2)
            x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
            y = torch.randint(3, (rows,), generator=generator)
            model.flag = step >= loop.at
            weight = 0.5 if loop.change == "weight" and step >= loop.at else 1.0
            given = {
                "dataclass": Batch(x, 0.5),
                "dict": {"x": x},
                "config": Config(x=x),
            }.get(loop.given, x)
            if loop.given == "cache":
                out = model(given, step, weight, Cache() if micro else cache)
            else:
                out = model(given, weight=weight, epoch=step)
            loss = torch.zeros((), dtype=torch.float64)
            if loop.returns in ("loss", "masked loss"):
                loss, out = out
            elif loop.returns == "tuple":
                out, hidden = out
                loss = loss + 0.1 * hidden.pow(2).sum()
            elif loop.returns == "dict":
                out = out["logits"]
            loss = loss + cross_entropy(out, y)
            loss.backward()
            log.loss(loss.detach() + model.told())
        if loop.grads == "clip":
            nn.utils.clip_grad_norm_(parameters, 0.5)
        log.step(optimizer, model)
        for p in parameters:
            if p.grad is None or loop.grads in ("none", "clip"):
                p.grad = None
                continue
            if loop.grads == "detach":
                p.grad.detach_()
            p.grad.zero_()


def unedited(log: Log, loop: Loop) -> None:
    """Play it as `instep run` would: sharded where there are other ranks, which keep one copy of
    parameters and of sums of gradients though they are small."""
    patches = [*SHARDED_CALL_PATCHES, *OPTIMIZER_PATCHES]
    patched = PatchHandle(patches if dist.is_initialized() else ())
    modules.reset()
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
            patch.setattr(one_copy, "FEWEST_ELEMENTS", 50)
            patch.setattr(in_place_bucket, "_SMALL_BYTES", 64)
            train(log, loop)
    finally:
        patched.remove()


@settings(
    max_examples=int(os.environ.get("DRAWN_LOOPS", "6")),
    deadline=None,
    derandomize="DRAWN_LOOPS" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(loop=loops, size=st.sampled_from([2, 3]))
def test_a_drawn_loop_has_the_numbers_of_one_process(loop, size):
    if loop.layer == "batch norm" and loop.optimizer == "Adam":
        # A bias before it has no gradient but rounding, which Adam enlarges in one process too.
        loop = replace(loop, optimizer="SGD")
    same_as_one_process(unedited, loop, sizes=(size,), dtype=torch.float64, nudge=True)
