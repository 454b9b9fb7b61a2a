"""`python -m instep.compat.apex.parallel.multiproc main.py …`, as Apex's module of this name.

Starts one process for each GPU (or `--world-size N`) by `instep run`, and gives each the arguments
`--world-size N --rank r`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import torch

from instep.process import python_command

MODULE = "instep.compat.apex.parallel.multiproc"


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the launcher or, in a process that it started, run the script."""
    if "INSTEP_JOB" not in os.environ:
        size = _option(arguments, "--world-size") or str(max(1, torch.accelerator.device_count()))
        ranks = ("run", "-n", size, "-m", MODULE)
        os.execv(sys.executable, python_command("-m", "instep", *ranks, *arguments))
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    sys.argv[:] = _set_option(_set_option(arguments, "--world-size", size), "--rank", rank)
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _option(arguments: Sequence[str], option: str) -> str | None:
    return arguments[arguments.index(option) + 1] if option in arguments else None


def _set_option(arguments: Sequence[str], option: str, value: str) -> list[str]:
    changed = list(arguments)
    if option in changed:
        changed[changed.index(option) + 1] = value
        return changed
    return [*changed, option, value]


if __name__ == "__main__":
    main(sys.argv[1:])
