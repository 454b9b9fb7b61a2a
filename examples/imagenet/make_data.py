"""Write a small data set in ImageNet's layout: no download, real images.

python examples/imagenet/make_data.py DATA --size 32 --train 140 --val 34

Ten classes are scikit-learn's scanned digits, two are crops of its photographs. Training and
validation images come from different digits, and from different halves of a photograph. Where more
images are asked for than there are digits, the digits are used again, rotated and shifted.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images


def digits(label: int, part: str, size: int) -> Iterator[Image.Image]:
    """Endless; the first four fifths of a class's digits are for training."""
    data = load_digits()
    scans = data.images[data.target == label]
    cut = len(scans) * 4 // 5
    scans = scans[:cut] if part == "train" else scans[cut:]
    moves = random.Random(label)
    again = False
    while True:
        for scan in scans:
            image = Image.fromarray((scan * 255 / 16).astype(np.uint8)).convert("RGB")
            image = image.resize((size, size), Image.Resampling.BICUBIC)
            if again:
                shift = [moves.uniform(-size / 16, size / 16) for _ in range(2)]
                image = image.rotate(
                    moves.uniform(-12, 12), Image.Resampling.BILINEAR, translate=shift
                )
            yield image
        again = True


def crops(photograph: np.ndarray, part: str, size: int) -> Iterator[Image.Image]:
    """Endless; squares of the left half are for training, of the right half for validation."""
    half = photograph.shape[1] // 2
    image = Image.fromarray(photograph[:, :half] if part == "train" else photograph[:, half:])
    places = random.Random(part)
    while True:
        side = places.randint(60, min(image.size) - 1)
        left, top = (places.randrange(edge - side) for edge in image.size)
        yield image.crop((left, top, left + side, top + side)).resize((size, size))


def classes(part: str, size: int) -> dict[str, Iterator[Image.Image]]:
    photographs = load_sample_images()
    names = [Path(name).stem for name in photographs.filenames]
    return {f"digit{label}": digits(label, part, size) for label in range(10)} | {
        name: crops(photograph, part, size)
        for name, photograph in zip(names, photographs.images, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the folder to write; train/ and val/ are made")
    parser.add_argument("--size", type=int, default=32, help="pixels of an edge (default: 32)")
    parser.add_argument("--train", type=int, default=140, help="of each class (default: 140)")
    parser.add_argument("--val", type=int, default=34, help="of each class (default: 34)")
    args = parser.parse_args()
    for part, number in {"train": args.train, "val": args.val}.items():
        for name, images in classes(part, args.size).items():
            folder = args.data / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for i, image in enumerate(islice(images, number)):
                image.save(folder / f"{name}_{i:05}.JPEG", quality=90)
    print(
        f"{args.data}: 12 classes, {12 * args.train} images to train, {12 * args.val} to validate"
    )


if __name__ == "__main__":
    main()
