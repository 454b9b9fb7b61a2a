"""What compressed gradients cost in accuracy, and save in bytes: examples/digits.py on two ranks.

    python benchmarks/compressed.py [--ranks 2] [--epochs 10] [--seeds 3] [--json FILE]

Every kind trains from the same parameters on the same batches. Beside the accuracy on the test set
stands, for the first gradient and for the parameters in the end, how far they are from those of
whole gradients, in relation to the gradient and to the way that training has moved the parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import instep
from instep import PowerSGD
from instep.distributed.communication.transport import (
    Transport,
    get_transport,
    use_transport,
)
from instep.distributed.pending import Pending
from machine import machine

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import digits

KINDS = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    **{f"PowerSGD({rank})": PowerSGD(rank) for rank in (1, 2, 4)},
}


class Counting:
    """A way to the other ranks that counts the bytes of all_reduce."""

    def __init__(self, way: Transport) -> None:
        self._way, self.sent = way, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._way, name)

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self.sent += tensor.numel() * tensor.itemsize
        return self._way.all_reduce(tensor, op)

    def sum_rounded(self, tensor: Tensor, dtype: torch.dtype) -> Pending:
        self.sent += tensor.numel() * dtype.itemsize
        return self._way.sum_rounded(tensor, dtype)

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        self.sent += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        self._way.all_reduce_each(tensors, op)


def train(kind: str, seed: int, epochs: int) -> dict[str, Any]:
    """As examples/digits.py does."""
    torch.manual_seed(seed)
    train_data, test_data = digits.load_data()
    loader = instep.shard(DataLoader(train_data, 64, shuffle=True))
    counting = Counting(get_transport())
    with use_transport(counting):
        model = instep.replicate(digits.build_model(), compression=KINDS[kind])
    begin = flat(p.detach() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    sent, gradient = [], None
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            before = counting.sent
            loss.backward()
            sent.append(counting.sent - before)
            if gradient is None:
                gradient = flat(p.grad for p in model.parameters())
            optimizer.step()
        schedule.step()
    model.eval()
    accuracy = instep.Accuracy()
    with torch.no_grad():
        for x, y in instep.shard(DataLoader(test_data, 64)):
            accuracy.update(model(x), y)
    (top1,) = accuracy.compute()
    end = flat(p.detach() for p in model.parameters())
    return {
        "accuracy": top1,
        "bytes": statistics.median(sent),
        "gradient": gradient,
        "end": end,
        "way": (end - begin).norm(),
    }


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def measure(rank: int, seeds: int, epochs: int) -> dict[str, list[dict[str, float]]]:
    """For each kind and seed, what it cost and saved. Collective."""
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        found = {kind: train(kind, seed, epochs) for kind in KINDS}
        whole = found["none"]
        for kind, one in found.items():
            off = (one["gradient"] - whole["gradient"]).norm() / whole["gradient"].norm()
            apart = (one["end"] - whole["end"]).norm() / whole["way"]
            rows[kind].append(
                {
                    "accuracy": one["accuracy"],
                    "bytes_per_step": one["bytes"],
                    "first_gradient_off": off.item(),
                    "parameters_off": apart.item(),
                }
            )
    return rows


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = instep.spawn(measure, (args.seeds, args.epochs), args.ranks)[0]
    print(f"{'':12} {'bytes a step':>12} {'accuracy':>9} {'1st gradient':>13} {'parameters':>11}")
    for kind, runs in rows.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{kind:12} {middle['bytes_per_step']:12.0f} {middle['accuracy']:9.4f} "
            f"{middle['first_gradient_off']:13.1e} {middle['parameters_off']:11.1e}"
        )
    if args.json:
        told = {"ranks": args.ranks, "epochs": args.epochs, "machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
