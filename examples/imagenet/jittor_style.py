"""ImageNet in Jittor's style: the script of one process, and a line where all must take part.

mpirun -n 4 python jittor_style.py --data DATA

As in Jittor, the script asks for sums over all processes, and rank 0 writes the files. Loaders and
gradients need no line. Unlike in Jittor, every image counts once, at any number of processes.
"""

import torch

import instep
from images import loaders
from instep.compat import jittor as jt
from loop import Ranks, fit, sgd
from options import check_batch, parser, seeded
from resnet import build


def total(sums: torch.Tensor) -> torch.Tensor:
    if jt.in_mpi:
        sums = jt.mpi_all_reduce(sums)
    return sums


def main() -> None:
    args = parser(__doc__).parse_args()
    check_batch(args, jt.world_size)
    device = seeded(args, jt.mpi.local_rank())
    train, val = loaders(args)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    jt.mpi_param_broadcast(model)
    model = instep.replicate(model)
    train, val = instep.shard(train), instep.shard(val)
    ranks = Ranks(jt.rank, jt.world_size, total)
    fit(args, device, model, sgd(model, args), train, val, ranks)


if __name__ == "__main__":
    main()
