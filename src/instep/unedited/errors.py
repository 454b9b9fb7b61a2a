"""Errors of unedited scripts. Messages stand where they are raised."""

from __future__ import annotations

import re

from instep.errors import LaunchError, TrainingError

_PART = re.compile(r"""\._(?:modules|parameters|buffers)\[(['"])(.*?)\1\]""")
"""A part, a parameter or a buffer of a module, where torch keeps it."""


def as_in_code(path: str) -> str:
    """A path of variables, attributes and entries, with parts of modules as scripts write them.

    `model._modules['0']._parameters['weight']` is `model[0].weight`.
    """
    return _PART.sub(lambda found: _part_in_code(found[2]), path)


def _part_in_code(name: str) -> str:
    if name.isdigit():
        return f"[{name}]"
    return f".{name}" if name.isidentifier() else f"[{name!r}]"


class UneditedError(LaunchError):
    """This script cannot run unedited on several ranks."""


class ShardedCallError(TrainingError):
    """A module's call cannot be sharded over the ranks."""

    @classmethod
    def changes_arguments(cls, module: object) -> ShardedCallError:
        """A forward that changes its arguments, of which each rank has others."""
        return cls(
            f"{type(module).__name__} began to change its arguments in its forward (a cache, a "
            "list, a tensor in place), which it did not do when its calls were first divided. "
            "Run this script with --plain, or let it return what is new instead."
        )


class MismatchError(Exception):
    """The ranks do not do the same in a trial, which ends on all of them."""


class LoadingError(TrainingError, RuntimeError):
    """A rank could not load its rows, and its exception cannot be sent to the other ranks."""

    def __init__(self, rank: int, type_name: str, trace: str) -> None:
        super().__init__(
            f"rank {rank} raised {type_name} while it loaded its rows of a batch, and the "
            f"exception cannot be sent to the other ranks. Its traceback:\n\n{trace}"
        )


class LostWorkerError(BaseException):
    """A loader's worker has ended, of which only its rank knows. No InstepError, and no Exception:
    if the script caught it, its ranks would go different ways."""

    def __init__(self, rank: int, pid: int, how: str) -> None:
        super().__init__(
            f"a worker process of a DataLoader (pid {pid}) of rank {rank} {how}. The other ranks "
            "load the same batches by workers of their own and have got theirs, so this script "
            "cannot catch the error and go on, as it could in one process."
        )


class CannotSaveScriptError(UneditedError):
    """`--checkpoint`: the state of this script cannot be saved or restored."""

    @classmethod
    def of_variable(cls, path: str, value: object, why: str) -> CannotSaveScriptError:
        """A variable, or what it leads to, that cannot be saved."""
        return cls(
            f"this script cannot be saved by --checkpoint: {as_in_code(path)} "
            f"({type(value).__name__}) {why}. "
            "Let the script save itself with instep.Checkpoint or torch.save, and run it without "
            "--checkpoint."
        )
