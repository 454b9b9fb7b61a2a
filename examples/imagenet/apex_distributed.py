"""ImageNet with Apex's amp and DistributedDataParallel.

instep run -n 4 apex_distributed.py --data DATA --amp
torchrun --nproc-per-node 4 -m instep apex_distributed.py --data DATA --amp

By Apex's rules, each rank has a batch of -b / ranks of its own, normalised by its own statistics,
and the gradients of the ranks are averaged. With --same, two other lines replace these, and the
numbers are those of one process. --amp is level O1, else O0. Images are normalised once.
"""

import torch
from apex import amp
from apex.parallel import DistributedDataParallel

import instep
from images import loaders, parts
from loop import Ranks, fit, sgd
from options import check_batch, parser, seeded
from resnet import build


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--same", action="store_true", help="the numbers of one process")
    args = flags.parse_args()
    check_batch(args, instep.world_size)
    device = seeded(args, instep.local_rank)
    train, val = loaders(args)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    optimizer = sgd(model, args)
    level, args.amp = "O1" if args.amp else "O0", False  # Apex casts from here on
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if args.same:
        model = instep.replicate(model)
        train, val = instep.shard(train), instep.shard(val)
    else:
        model = DistributedDataParallel(model)
        train, val = parts((train, val), instep.rank, instep.world_size)

    def backward(loss: torch.Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    ranks = Ranks(instep.rank, instep.world_size, instep.all_reduce)
    fit(args, device, model, optimizer, train, val, ranks, backward, also={"amp": amp})


if __name__ == "__main__":
    main()
