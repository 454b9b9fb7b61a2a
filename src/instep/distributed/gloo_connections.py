"""When the ranks of a Gloo group connect: in a large world, two ranks when one sends to the other.

Otherwise each rank reads from the store the address of each other one, which holds a number for
each rank, and connects to it: at 10,000 ranks 740 MB and 9,999 sockets for each rank and group. A
ring or a tree uses a few of them.
"""

from __future__ import annotations

import os

_VARIABLE = "TORCH_GLOO_LAZY_INIT"
_LARGE = 128
"""Ranks. Up to here each reads 140 KB at most, and all others see at once that a rank has died."""


def connect_when_used(size: int) -> None:
    """Set torch's variable for a large world; one that the user has set stays. Before any group."""
    if size > _LARGE:
        os.environ.setdefault(_VARIABLE, "1")
