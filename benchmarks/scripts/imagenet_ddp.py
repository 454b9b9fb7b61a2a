"""ImageNet with PyTorch's DistributedDataParallel, for comparison.

torchrun --nproc-per-node 4 benchmarks/scripts/imagenet_ddp.py --data DATA
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # later it would keep the group alive, whose threads may abort the end
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "imagenet"))

from images import loaders, parts
from loop import Ranks, fit, sgd
from options import check_batch, parser, seeded
from resnet import build


def total(sums: torch.Tensor) -> torch.Tensor:
    sums = sums.clone()
    dist.all_reduce(sums)
    return sums


def main() -> None:
    args = parser(__doc__).parse_args()
    device = seeded(args, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    check_batch(args, size)
    train, val = parts(loaders(args), rank, size)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    model = DistributedDataParallel(model, [device.index] if device.index is not None else None)
    fit(args, device, model, sgd(model, args), train, val, Ranks(rank, size, total))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
