"""The session of an unedited script: from `start` to `stop` every rank runs the whole script, and
the script sees one process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.process import print_line, settings
from instep.process.patching import Patch
from instep.process.process_value import ProcessValue
from instep.unedited import bitwise, launcher_env
from instep.unedited.data.loader_patch import LOADER_PATCH
from instep.unedited.errors import UneditedError
from instep.unedited.opt_out import BatchEffect
from instep.unedited.single_rank import SingleRankSession

if TYPE_CHECKING:
    from instep.unedited.multi_rank import MultiRankSession  # it imports torch

_current = ProcessValue["SingleRankSession | MultiRankSession | None"](None)
_at_opt_out: list[Callable[[], object]] = []
_reasons: list[str] = []


def current() -> SingleRankSession | MultiRankSession | None:
    """The session of this process."""
    return _current.value


def start() -> None:
    """Join the other ranks and let the script that follows see one process.

    Does nothing the second time, or in a process that multiprocessing started, which is no rank.
    Starts this program again if strings would have different hashes on the ranks.
    Raises LaunchError.
    """
    if _current.value is None and multiprocessing.parent_process() is None:
        world = launchers.detect()
        if settings.is_bitwise():
            bitwise.start(world.size)
        if world.size > 1:
            _check_hash_seed()
            fix_hash_seed()
        launcher_env.set_visible_device(world)
        if world.size == 1:
            _current.value = SingleRankSession(world, [LOADER_PATCH, *_bitwise_patches()])
        else:
            from instep.unedited.multi_rank import MultiRankSession  # it imports torch

            _current.value = MultiRankSession(opt_out)


def _bitwise_patches() -> Sequence[Patch]:
    if not settings.is_bitwise():
        return ()
    from instep.unedited.patch_table import BITWISE_PATCHES  # it imports torch

    return BITWISE_PATCHES


def stop() -> None:
    """Restore everything that `start` has replaced."""
    session, _current.value = _current.value, None
    if session is not None:
        session.end()


def opt_out(reason: str, effect: BatchEffect = BatchEffect.UNKNOWN) -> None:
    """Let the script run on every rank as it is from now on.

    Does nothing in a world of one. Raises UneditedError if the ranks have shared work already.
    """
    session = _current.value
    if session is None or isinstance(session, SingleRankSession):
        return
    bitwise.check_divided(reason)
    from instep.unedited.sharded_call.counting import call_counts  # it imports torch

    if session.has_begun or call_counts.sharded:
        raise UneditedError(
            f"all ranks have run this script as one process so far, and now {reason}. "
            "Run it with --plain, as a script for several processes."
        )
    print_opt_out(session.world, reason, effect)
    session.leave_job()
    stop()
    while _at_opt_out:
        _at_opt_out.pop()()


def at_opt_out(function: Callable[[], object]) -> None:
    """Call `function` when the script opts out, after everything is restored."""
    _at_opt_out.append(function)


def add_notes(error: BaseException) -> None:
    """Note on an exception of the script what instep knows of its cause."""
    if _current.value is not None:
        _current.value.add_notes(error)


def reports_failure(
    message: str,
    error: BaseException | None = None,
    *,
    alike: Callable[[], object] = lambda: None,
) -> bool:
    """Called when the script fails, by an exception or not: waits until that may be reported;
    whether by this rank. Calls `alike` once rank 0 is known to fail in the same way."""
    return _current.value is None or _current.value.reports_failure(message, error, alike)


def print_opt_out(world: World, reason: str, effect: BatchEffect) -> None:
    """Print one line on rank 0 of several."""
    if world.size == 1:
        return
    if effect not in (BatchEffect.SAME, BatchEffect.SHARDED, BatchEffect.UNSHARDED):
        _reasons.append(reason)
    if world.rank == 0 and launchers.RESTARTS not in os.environ:
        line = f"every rank runs this script as it is, since {reason}."
        sentences = [line, *filter(None, [effect.format(n=world.size)]), "[INS714]"]
        if effect is BatchEffect.SHARDED:
            sentences = [f"{reason}: {effect}", "[INS714]"]
        print_line(" ".join(sentences))


def opt_out_reason() -> str | None:
    """Why every rank runs the script as it is, without dividing the batch that it names, if so."""
    return next(iter(_reasons), None)


def _check_hash_seed() -> None:
    if sys.flags.ignore_environment:
        raise UneditedError(
            "with its options -E and -I Python does not read PYTHONHASHSEED, so that sets of "
            "strings would have another order on each rank. Leave the option out, or run this "
            "script with --plain."
        )


def fix_hash_seed() -> None:
    """Start this program again, unless sets of strings have the same order on all ranks already.

    Python decides about that as it starts.
    """
    random = (os.environ.get("PYTHONHASHSEED") or "random") == "random"
    if random and "-" not in sys.orig_argv:
        os.environ["PYTHONHASHSEED"] = "0"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, sys.orig_argv)
