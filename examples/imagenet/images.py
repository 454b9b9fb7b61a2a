"""ImageNet's layout (train/<class>/*, val/<class>/*): images, augmentation, loaders.

The order of an epoch and the randomness in a sample depend only on (seed, epoch, index). They do
not depend on the rank, the worker or the way of running.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
AUGMENTATIONS = {"imagenet": (0.08, 0.5), "light": (0.6, 0.0)}
"""The least part of an image's area that a crop keeps, and the probability of mirroring it."""


class DataError(ValueError):
    """The data set has a fault; the message names the file or folder."""


class Images(Dataset[tuple[Tensor, int]]):
    """The images of one part, in the order of their paths; classes are numbered by name.

    Raises DataError for a folder without classes and for classes without images.
    """

    def __init__(self, folder: Path, size: int, augment: str | None, seed: int) -> None:
        self.size, self.augment, self.seed, self.epoch = size, augment, seed, 0
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder; --data holds train/<class>/ and val/<class>/.")
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if not self.classes:
            raise DataError(f"{folder} holds no folders; each class has a folder of its own.")
        self.samples = [
            (folder / name / file, label)
            for label, name in enumerate(self.classes)
            for file in sorted(os.listdir(folder / name))
            if file.lower().endswith(SUFFIXES)
        ]
        full = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in full]
        if empty:
            raise DataError(f"no image ({', '.join(SUFFIXES)}) in {folder} for {listed(empty)}.")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = opened(path, self.size)
        if self.augment is None:
            return tensor(center(image, self.size)), label
        draws = np.random.default_rng([self.seed, self.epoch, index])
        return tensor(augmented(image, self.size, draws, *AUGMENTATIONS[self.augment])), label

    def without_broken(self, threads: int) -> list[Path]:
        """Read every file once, leave out incomplete images, and return the paths left out."""
        with ThreadPool(max(1, threads)) as pool:
            fine = pool.map(lambda sample: readable(sample[0]), self.samples, chunksize=16)
        broken = [path for (path, _), good in zip(self.samples, fine, strict=True) if not good]
        self.samples = [sample for sample, good in zip(self.samples, fine, strict=True) if good]
        return broken


def opened(path: Path, size: int) -> Image.Image:
    """An image in RGB; a JPEG that is far larger than `size` is decoded smaller, as it allows."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * size, 2 * size))
            return image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise DataError(
            f"{path} is no whole image ({error}). Remove it, or leave such out by --skip-broken."
        ) from error


def readable(path: Path) -> bool:
    try:
        opened(path, 1 << 16)
    except DataError:
        return False
    return True


def augmented(
    image: Image.Image, size: int, draws: np.random.Generator, least: float, mirrored: float
) -> Image.Image:
    """A random part of random area and shape (3:4 to 4:3), scaled to `size`, perhaps mirrored.

    After Szegedy et al. 2015, as torchvision's RandomResizedCrop: ten tries, then the centre.
    """
    width, height = image.size
    box = None
    for _ in range(10):
        area = width * height * draws.uniform(least, 1)
        ratio = math.exp(draws.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draws.integers(0, width - w + 1), draws.integers(0, height - h + 1)
            box = (int(left), int(top), int(left) + w, int(top) + h)
            break
    flip = draws.random() < mirrored
    if box is None:
        part = center(image, size)
    else:
        part = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else part


def center(image: Image.Image, size: int) -> Image.Image:
    """The central seven eighths, a square, scaled to `size`; small images whole."""
    side = min(image.size)
    side = round(side * 7 / 8) if side > size else side
    left, top = ((edge - side) / 2 for edge in image.size)
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box)


def tensor(image: Image.Image) -> Tensor:
    """(3, height, width), float32, with ImageNet's mean and deviation taken out."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels.contiguous().float() / 255 - MEAN) / DEVIATION


class Shuffled(Sampler[int]):
    """The order of torch's DistributedSampler, made from seed and epoch."""

    def __init__(self, data: Images) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        draws = torch.Generator().manual_seed(self.data.seed + self.epoch)
        return iter(torch.randperm(len(self.data), generator=draws).tolist())


def data_sets(args: Namespace) -> tuple[Images, Images]:
    """The loaders for training and for validation. Raises DataError."""
    train = Images(args.data / "train", args.size, args.augment, args.seed)
    val = Images(args.data / "val", args.size, None, args.seed)
    if train.classes != val.classes:
        only = {
            part: sorted(set(one.classes) - set(other.classes))
            for part, one, other in (("train", train, val), ("val", val, train))
        }
        said = " and ".join(f"only {part}/ has {listed(c)}" for part, c in only.items() if c)
        raise DataError(f"{args.data}: train/ and val/ hold other classes: {said}.")
    if args.skip_broken:
        for data in (train, val):
            for path in data.without_broken(args.workers):
                print(f"left out, no whole image: {path}", flush=True)
    if len(train) < args.batch_size and not args.evaluate:
        raise DataError(
            f"{args.data}/train holds {len(train)} images, less than one batch of "
            f"{args.batch_size}; make -b smaller."
        )
    return train, val


def loaders(args: Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of the whole job. The last, smaller one of a training epoch is left out."""
    train, val = data_sets(args)
    shared = {
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "pin_memory": torch.cuda.is_available(),
    }
    return (
        DataLoader(train, sampler=Shuffled(train), drop_last=True, **shared),
        DataLoader(val, **shared),
    )


def parts(
    loaders: Iterable[DataLoader[Any]], rank: int, size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders by the rules of DistributedSampler: each rank has a batch of its own, of the whole
    job's divided by the ranks. What is only there to fill up counts in training, not in validation.
    """
    train, val = loaders
    if train.batch_size % size:
        raise SystemExit(f"-b {train.batch_size} cannot be divided by the {size} ranks.")
    mine = {"batch_size": train.batch_size // size, "num_workers": train.num_workers}
    mine["pin_memory"] = train.pin_memory
    order = DistributedSampler(train.dataset, size, rank, seed=train.dataset.seed)
    share = range(rank, len(val.dataset), size)
    return (
        DataLoader(train.dataset, sampler=order, drop_last=True, **mine),
        DataLoader(val.dataset, sampler=share, **mine),
    )


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
