"""`--local_rank`: the argument by which torch.distributed.launch passed the local rank to a script.

A script that declares it, in either spelling, gets it, and runs as it is, because it was written
for several processes. A script that does not declare it never sees it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from instep.distributed.identity.world import World
from instep.process.patching import Patch, PatchHandle

SPELLINGS = ("--local-rank", "--local_rank")
_GIVEN = re.compile("--local[-_]rank(=.*)?")


def add_local_rank(world: World) -> None:
    """Give the local rank to every parser of argparse that declares the argument."""
    if world != World():
        parse = partial(_parse_known_args, world.local_rank)
        PatchHandle([Patch("argparse:ArgumentParser", "parse_known_args", parse)])


def without(words: Sequence[str]) -> Sequence[str]:
    """`words` without the leading argument that torch.distributed.launch has inserted."""
    return words[1:] if words and re.fullmatch("--local[-_]rank=[0-9]+", words[0]) else words


def _parse_known_args(
    local_rank: int,
    original: Callable[..., Any],
    parser: Any,
    args: Sequence[str] | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    words = sys.argv[1:] if args is None else list(args)
    declared = [name for name in SPELLINGS if name in parser._option_string_actions]
    if declared and words == sys.argv[1:] and not any(map(_GIVEN.fullmatch, words)):
        from instep.unedited import session  # the supervisor does not need them

        session.opt_out(f"it takes {declared[0]}")
        words = [f"{declared[0]}={local_rank}", *words]
    return original(parser, words, *rest, **kwargs)
