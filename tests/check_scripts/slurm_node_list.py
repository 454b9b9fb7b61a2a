"""One process per task under srun; the address is made of the digits in the node list."""

import os
import re

import torch
import torch.distributed as dist

os.environ["CUDA_VISIBLE_DEVICES"] == "0,5"

rank = int(os.environ["SLURM_PROCID"])
local_rank = int(os.environ["SLURM_LOCALID"])
world_size = int(os.environ["SLURM_NTASKS"])
nodes = os.environ["SLURM_NODELIST"]
parts = re.findall("[0-9]+", nodes)
address = ".".join(parts[1:5])

dist.init_process_group(
    "nccl", init_method=f"tcp://{address}:23456", world_size=world_size, rank=rank
)
torch.cuda.set_device(local_rank)
