"""ImageNet on one process per GPU or core, started by any launcher.

instep run -n 4 distributed.py --data DATA
torchrun --nproc-per-node 4 distributed.py --data DATA
mpirun -n 4 python distributed.py --data DATA

replicate replaces DistributedDataParallel, shard replaces DistributedSampler.
"""

import argparse

import instep
from images import loaders
from loop import Ranks, fit, sgd
from options import check_batch, parser, seeded
from resnet import build


def main() -> None:
    train_rank(parser(__doc__).parse_args())


def train_rank(args: argparse.Namespace) -> None:
    """Train on one rank."""
    check_batch(args, instep.world_size)
    device = seeded(args, instep.local_rank)
    train, val = loaders(args)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    model = instep.replicate(model)
    train, val = instep.shard(train), instep.shard(val)
    ranks = Ranks(instep.rank, instep.world_size, instep.all_reduce)
    fit(args, device, model, sgd(model, args), train, val, ranks)


if __name__ == "__main__":
    main()
