"""Which mutants are tried: drawn with a seed, from each package as many as it has lines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import operators
from operators import Mutant


def draw(root: Path, files: dict[str, list[str]], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of these packages' files, in turn one of each package.

    With more asked for, the same seed gives the same ones and more.
    """
    lines = {
        package: sum((root / path).read_bytes().count(b"\n") for path in paths)
        for package, paths in files.items()
    }
    quota = shares(lines, count)
    drawn = {
        package: list(islice(_shuffled(root, paths, seed), quota[package]))
        for package, paths in files.items()
    }
    order = [
        (at / len(mutants), mutant)
        for mutants in drawn.values()
        for at, mutant in enumerate(mutants)
    ]
    return [mutant for _, mutant in sorted(order, key=lambda pair: pair[0])]


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """`count` divided as the sizes are, in whole numbers."""
    total, given, summed = sum(sizes.values()), 0, 0
    result = {}
    for name, size in sizes.items():
        summed += size
        result[name] = count * summed // total - given
        given += result[name]
    return result


def _shuffled(root: Path, paths: list[str], seed: int) -> Iterator[Mutant]:
    found = [m for path in paths for m in operators.mutants(path, (root / path).read_bytes())]
    random.Random(seed).shuffle(found)
    for mutant in found:
        if mutant.applied((root / mutant.path).read_bytes()) is not None:
            yield mutant
