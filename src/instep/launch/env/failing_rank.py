"""A job whose last rank fails while the others wait for it: a part of `instep env --selftest`."""

from __future__ import annotations

import torch

from instep.distributed.communication.collectives import all_reduce
from instep.distributed.identity.torch_devices import own_device
from instep.distributed.rendezvous.bootstrap import init

MESSAGE = "this rank fails on purpose"


def main() -> None:
    """Run it on every rank. Raises RuntimeError on the last one."""
    world, device = init(), own_device()
    for step in range(100):
        if step == 2 and world.rank == world.size - 1:
            raise RuntimeError(MESSAGE)
        all_reduce(torch.ones(1000, device=device))


if __name__ == "__main__":
    main()
