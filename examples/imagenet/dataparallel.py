"""ImageNet with nn.DataParallel: one process, all the GPUs it can see.

python dataparallel.py --data DATA                     the GPUs of this host, in threads
instep run -n 4 dataparallel.py --data DATA            four processes, unedited

DataParallel cuts each batch into pieces (scatter), copies the model to every GPU, and collects the
outputs on the first one (gather). It normalises each piece by its own statistics, so its numbers
depend on the number of GPUs. Under `instep run` the numbers are those of one process.
"""

from torch import nn

from images import loaders
from loop import fit, sgd
from options import parser, seeded
from resnet import build


def main() -> None:
    args = parser(__doc__).parse_args()
    device = seeded(args)
    train, val = loaders(args)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    model = nn.DataParallel(model)
    fit(args, device, model, sgd(model, args), train, val)


if __name__ == "__main__":
    main()
