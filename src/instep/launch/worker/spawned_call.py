"""A rank of `instep.spawn`: read a call from a folder, make it, and write the result there."""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from pathlib import Path

from instep.launch.errors import CannotSendError

CALL = "call"
"""The file with the call."""


def result_file(folder: Path, local_rank: int) -> Path:
    """The file with the result of one rank."""
    return folder / f"result{local_rank}"


def main(name: str) -> None:
    """Run one rank. The function's exceptions escape."""
    import cloudpickle

    folder, local_rank = Path(name), int(os.environ["LOCAL_RANK"])
    with (folder / CALL).open("rb") as file:
        path, argv, cells = pickle.load(file)
        sys.path[:], sys.argv[:] = path, argv
        linecache.cache.update(cells)
        fn, args = pickle.load(file)
    value = fn(local_rank, *args)
    try:
        packed = cloudpickle.dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        name = getattr(fn, "__name__", repr(fn))
        raise CannotSendError(
            f"what {name} returned cannot be sent back: {error}. Return something that pickles, "
            "or None."
        ) from error
    result_file(folder, local_rank).write_bytes(packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
