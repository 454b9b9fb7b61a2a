"""Made records: a training of three steps that is the same at any number of ranks, and its errors.

The batches have 8, 8 and 7 samples; ranks share them as instep does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from instep.training.blocks import Block
from instep.verify.compare import gradient_gaps
from instep.verify.divergence import FLOAT32, Evidence
from instep.verify.recording.records import End, Print, Rank, Run, Step

BATCHES = (8, 8, 7)
Change = Callable[[int, int, Step], dict[str, Any]]
"""From rank, step number and the honest step to what is different about it."""


def nothing(rank: int, k: int, step: Step) -> dict[str, Any]:
    return {}


def gradient(k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return {name: torch.randn(20, generator=generator) for name in ("weight", "bias")}


def honest(rank: int, n: int, k: int) -> Step:
    block = Block(rank, n, BATCHES[k])
    return Step(
        losses=((2.0 - 0.1 * k, block.count / block.total),),
        rates=(0.1 * 0.9**k,),
        samples=block.count,
        rows=tuple(100 * k + i for i in range(block.start, block.stop)),
        random="state",
        gradients={name: Print(float(g.norm()), float(g.sum())) for name, g in gradient(k).items()},
        parameters={"weight": Print(5.0, 1.0 + k), "bias": Print(3.0, 2.0 + k)},
        buffers={"1.running_mean": Print(1.0, 0.1 * k), "1.running_var": Print(2.0, 1.0 - 0.1 * k)},
    )


def run(n: int, change: Change = nothing, steps: int = 3, **fields: Any) -> Run:
    ranks = []
    for rank in range(n):
        made = []
        for k in range(steps):
            step = honest(rank, n, k)
            made.append(replace(step, **change(rank, k, step)))
        ranks.append(Rank(tuple(made), End()))
    tensors = {"weight": torch.full((20,), 2.0), "bias": torch.full((20,), 1.0)}
    defaults = {
        "gradients": {k: gradient(k) for k in range(steps)},
        "initial": {name: torch.zeros(20) for name in tensors},
        "parameters": tensors,
        "buffers": {"1.running_mean": torch.ones(4), "1.num_batches_tracked": torch.tensor(3)},
    }
    return Run(n, tuple(ranks), **{**defaults, **fields})


def evidence(n: int, change: Change = nothing, spoil: Any = None, **runs: Run) -> Evidence:
    """What there is when the ranks' records are changed, and their gradients by `spoil(k, g)`."""
    gradients = {
        k: {name: spoil(k, g) if spoil else g for name, g in gradient(k).items()} for k in range(3)
    }
    oracle = runs.get("oracle", run(1))
    pinned = run(n, change, gradients=gradients)
    gaps = gradient_gaps(oracle, pinned)
    free = runs.get("free", pinned)
    return Evidence(oracle, runs.get("noise", oracle), pinned, free, gaps, FLOAT32)
