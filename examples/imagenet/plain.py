"""ImageNet on one process; nothing here mentions another one.

python plain.py --data DATA                            one process
instep run -n 4 plain.py --data DATA                   four, unedited: the same numbers
mpirun -n 4 python -m instep plain.py --data DATA      the same under any launcher
"""

from images import loaders
from loop import fit, sgd
from options import parser, seeded
from resnet import build


def main() -> None:
    args = parser(__doc__).parse_args()
    device = seeded(args)
    train, val = loaders(args)
    model = build(args.arch, len(train.dataset.classes)).to(device)
    fit(args, device, model, sgd(model, args), train, val)


if __name__ == "__main__":
    main()
