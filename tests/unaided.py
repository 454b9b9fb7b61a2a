"""Knows nothing of instep and makes its process groups itself: `unaided.py FOLDER`."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from trained import INHERITED, listening

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--method", default="env://")
parser.add_argument("folder")
args = parser.parse_args()

if args.method == "env://":
    dist.init_process_group("gloo")
else:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", args.method, rank=rank, world_size=size)
rank = dist.get_rank()
total = torch.tensor(rank + 1.0)
dist.all_reduce(total)
part = torch.ones(1)
dist.all_reduce(part, group=dist.new_group([0, 1]))
report = {
    "local_rank": args.local_rank,
    "total": total.item(),
    "part": part.item(),
    "listening": sorted(listening() - INHERITED),
    "variables": {name: os.environ[name] for name in ("LOCAL_RANK", "MASTER_ADDR")},
}
Path(args.folder, f"rank{rank}.json").write_text(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
