"""One small training, the same under every launcher: `python trained.py FOLDER`.

Each rank leaves a report in FOLDER: who it was, what it listened on, and what it had learned.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def listening() -> set[str]:
    """The sockets on which this process listens, as /proc writes them: address:port."""
    texts = [Path("/proc/net", kind).read_text() for kind in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()]
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


INHERITED = listening()  # MPICH's mpirun hands its own to each rank


def train() -> list[float]:
    """Batch normalisation, dropout and a ragged last batch; the parameters in the end."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import instep

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(8, 3),
    ).double()
    data = TensorDataset(torch.randn(45, 6).double(), torch.randn(45, 3).double())
    loader = DataLoader(data, 8, shuffle=True)
    model, loader = instep.replicate(model), instep.shard(loader)
    for _ in range(2):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def main(folder: str) -> None:
    import torch

    import instep

    learned = train()
    instep.group([0, 1])  # listens too
    world = instep.world
    report = {
        "world": [world.rank, world.size, world.local_rank, world.local_size, world.node_rank],
        "source": world.source,
        "backend": torch.distributed.get_backend(),
        "listening": sorted(listening() - INHERITED),
        "learned": learned,
    }
    Path(folder, f"rank{world.rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()  # a rank that ends breaks the connections that others still make


if __name__ == "__main__":
    from instep.launch.worker import torch_import

    torch_import.prepare()  # or the first forward would import torch.compile, which takes seconds
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank")  # from torch.distributed.launch
    parser.add_argument("folder")
    main(parser.parse_args().folder)
