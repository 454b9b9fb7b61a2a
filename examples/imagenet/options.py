"""The flags that all ways have in common."""

import argparse
from pathlib import Path

import torch

from images import AUGMENTATIONS
from resnet import ARCHITECTURES


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a folder with train/<class>/ and val/<class>/")
    add("-a", "--arch", choices=ARCHITECTURES, default="resnet18")
    add("-j", "--workers", type=int, default=2, help="processes that load images, for each rank")
    add("--epochs", type=positive, default=90)
    add("-b", "--batch-size", type=positive, default=256, help="of all ranks together")
    add("--size", type=positive, default=224, help="pixels of an edge")
    add("--augment", choices=AUGMENTATIONS, default="imagenet", help="light: for digits")
    add("--lr", type=float, default=0.1, help="a tenth of it every 30 epochs")
    add("--momentum", type=float, default=0.9)
    add("--wd", "--weight-decay", dest="wd", type=float, default=1e-4)
    add("--warmup", type=float, default=0, metavar="EPOCHS", help="let the rate grow for so long")
    add("--linear-scaling", action="store_true", help="multiply the rate by batch size / 256")
    add("-p", "--print-freq", type=positive, default=10, metavar="STEPS")
    add("-e", "--evaluate", action="store_true", help="validate only")
    add("--seed", type=int, default=0)
    add("--amp", action="store_true", help="float16 on GPUs, bfloat16 on CPUs")
    add("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")
    add("--out", type=Path, default=Path("out"), help="checkpoints and statistics go here")
    add("--tensorboard", action="store_true", help="write curves for TensorBoard to --out, too")
    add("--skip-broken", action="store_true", help="read all files first, leave out broken ones")
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {number}")
    return number


def seeded(args: argparse.Namespace, local_rank: int = 0) -> torch.device:
    """Seed torch, and return this process's device."""
    torch.manual_seed(args.seed)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def check_batch(args: argparse.Namespace, ranks: int) -> None:
    """Exit if the batch of all ranks is smaller than their number."""
    if args.batch_size < ranks:
        raise SystemExit(
            f"-b {args.batch_size} is the batch of all ranks together, and there are {ranks}: "
            "some would have nothing to do. Take a larger -b or fewer ranks."
        )
