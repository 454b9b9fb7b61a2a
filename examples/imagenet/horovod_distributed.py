"""ImageNet by Horovod's rules.

instep horovodrun -np 4 python horovod_distributed.py --data DATA
instep run -n 4 horovod_distributed.py --data DATA --same

By Horovod's rules, each rank has a batch of -b / ranks of its own, normalised by its own
statistics, and the gradients of the ranks are averaged. With --same, two other lines replace these,
and the numbers are those of one process.
"""

import horovod.torch as hvd

import instep
from images import loaders, parts
from loop import Ranks, fit, sgd
from options import check_batch, parser, seeded
from resnet import build


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--same", action="store_true", help="the numbers of one process")
    args = flags.parse_args()
    hvd.init()
    check_batch(args, hvd.size())
    device = seeded(args, hvd.local_rank())
    train, val = loaders(args)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    optimizer = sgd(model, args)
    if args.same:
        model = instep.replicate(model)
        train, val = instep.shard(train), instep.shard(val)
    else:
        compression = hvd.Compression.fp16 if args.amp else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train, val = parts((train, val), hvd.rank(), hvd.size())
    ranks = Ranks(hvd.rank(), hvd.size(), lambda sums: hvd.allreduce(sums, op=hvd.Sum))
    fit(args, device, model, optimizer, train, val, ranks)


if __name__ == "__main__":
    main()
