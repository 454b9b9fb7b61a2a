"""Made records: a training of three steps that is the same at any number of ranks, and its errors.

The batches have 8, 8 and 7 samples; ranks share them as instep does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from instep.training.blocks import Block
from instep.verify.compare import compare_gradients
from instep.verify.divergence import FLOAT32, Evidence
from instep.verify.recording.records import (
    Fingerprint,
    RankRecord,
    RankSummary,
    RunRecord,
    StepRecord,
)

BATCHES = (8, 8, 7)
Change = Callable[[int, int, StepRecord], dict[str, Any]]
"""From rank, step number and the honest step to what is different about it."""


def nothing(rank: int, k: int, step: StepRecord) -> dict[str, Any]:
    return {}


def gradient(k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return {name: torch.randn(20, generator=generator) for name in ("weight", "bias")}


def honest(rank: int, n: int, k: int) -> StepRecord:
    block = Block(rank, n, BATCHES[k])
    return StepRecord(
        losses=((2.0 - 0.1 * k, block.count / block.total),),
        lrs=(0.1 * 0.9**k,),
        samples=block.count,
        row_hashes=tuple(100 * k + i for i in range(block.start, block.stop)),
        generator_hash="state",
        gradients={
            name: Fingerprint(float(g.norm()), float(g.sum())) for name, g in gradient(k).items()
        },
        parameters={"weight": Fingerprint(5.0, 1.0 + k), "bias": Fingerprint(3.0, 2.0 + k)},
        buffers={
            "1.running_mean": Fingerprint(1.0, 0.1 * k),
            "1.running_var": Fingerprint(2.0, 1.0 - 0.1 * k),
        },
    )


def run(n: int, change: Change = nothing, steps: int = 3, **fields: Any) -> RunRecord:
    ranks = []
    for rank in range(n):
        made = []
        for k in range(steps):
            step = honest(rank, n, k)
            made.append(replace(step, **change(rank, k, step)))
        ranks.append(RankRecord(tuple(made), RankSummary()))
    tensors = {"weight": torch.full((20,), 2.0), "bias": torch.full((20,), 1.0)}
    defaults = {
        "gradients": {k: gradient(k) for k in range(steps)},
        "initial": {name: torch.zeros(20) for name in tensors},
        "parameters": tensors,
        "buffers": {"1.running_mean": torch.ones(4), "1.num_batches_tracked": torch.tensor(3)},
    }
    return RunRecord(n, tuple(ranks), **{**defaults, **fields})


def evidence(n: int, change: Change = nothing, spoil: Any = None, **runs: RunRecord) -> Evidence:
    """What there is when the ranks' records are changed, and their gradients by `spoil(k, g)`."""
    gradients = {
        k: {name: spoil(k, g) if spoil else g for name, g in gradient(k).items()} for k in range(3)
    }
    oracle = runs.get("oracle", run(1))
    pinned = run(n, change, gradients=gradients)
    diffs = compare_gradients(oracle, pinned)
    free = runs.get("free", pinned)
    return Evidence(oracle, runs.get("noise", oracle), pinned, free, diffs, FLOAT32, oracle)
