"""`--bitwise V`: numbers whose bits do not depend on the number of ranks.

Every batch is cut into V shards, of which each rank computes V/N, one by one and on one thread,
and what is combined over rows is combined along one tree (`sharded_call/shards`). In a world of one
the same is done, so module calls are replaced there, too.
"""

from __future__ import annotations

import os

from instep.process import malloc, settings
from instep.process.import_hooks import after_import
from instep.training.errors import BitwiseError

_THREADS = "OMP_NUM_THREADS"
"""A kernel's result depends on its threads: by default there is one, at any number of ranks."""


def check_ranks(shards: int, ranks: int) -> None:
    """Raise BitwiseError unless each of so many ranks gets a whole subtree of the shards."""
    if shards < 1 or shards.bit_count() != 1:
        raise BitwiseError(
            f"--bitwise takes a power of two (8, say), not {shards}: the number of shards into "
            "which every batch is cut."
        )
    if shards % ranks:
        *others, last = [str(1 << k) for k in range(shards.bit_length())]
        possible = f"{', '.join(others)} or {last}" if others else last
        raise BitwiseError(f"--bitwise {shards} runs on {possible} ranks, not on {ranks}.")


def check_divided(reason: str) -> None:
    """Raise BitwiseError where every rank would run a script as it is."""
    if settings.is_bitwise():
        raise BitwiseError(
            f"--bitwise {settings.BITWISE} divides scripts that are one process, and every rank "
            f"would run this one as it is, since {reason}. Run it without --bitwise."
        )


def variables(shards: int | None, ranks: int) -> dict[str, str]:
    """The environment variables of a job with so many shards, or with INSTEP_BITWISE of them.

    Raises BitwiseError.
    """
    shards = int(settings.BITWISE) if shards is None else shards
    check_ranks(shards, ranks)
    return {settings.BITWISE.name: str(shards), _THREADS: os.environ.get(_THREADS, "1")}


def start(ranks: int) -> None:
    """What a rank does at its start. Raises BitwiseError."""
    check_ranks(int(settings.BITWISE), ranks)
    asked = os.environ.get(_THREADS, "1").partition(",")[0]  # "4,2" is 4, and 2 where nested
    threads = int(asked) if asked.isdecimal() else 1
    after_import("torch", lambda torch: torch.set_num_threads(max(1, threads)))
    malloc.share_freed_memory()  # the shards are threads that take turns
    if ranks == 1:  # else the ranks do it as they meet, on CPUs
        malloc.keep_freed_memory()
