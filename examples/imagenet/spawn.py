"""ImageNet on processes that the script itself starts.

python spawn.py --data DATA --nprocs 4

instep.spawn replaces torch.multiprocessing.spawn; there is no port to choose, no rank to compute.
"""

import argparse
import os

import torch

import instep
from distributed import train_rank
from options import check_batch, parser


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or os.cpu_count())
    args = flags.parse_args()
    check_batch(args, args.nprocs)
    instep.spawn(worker, (args,), nprocs=args.nprocs, output="rank0")


def worker(local_rank: int, args: argparse.Namespace) -> None:
    train_rank(args)


if __name__ == "__main__":
    main()
