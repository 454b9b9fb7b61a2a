"""`--local_rank`: the argument by which torch.distributed.launch passed the local rank to a script.

A script that runs as it is and declares it, in either spelling, gets it. A script that does not
declare it never sees it. An unedited script sees one process, so it gets its own default, and the
local rank is filled in if it opts out later; it opts out at once if it requires the argument.
"""

from __future__ import annotations

import argparse
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
    if not declared or words != sys.argv[1:] or any(map(_GIVEN.fullmatch, words)):
        return original(parser, words, *rest, **kwargs)
    from instep.unedited import session  # the supervisor does not need them

    action = parser._option_string_actions[declared[0]]
    if action.required:
        session.opt_out(f"it requires {declared[0]}")
    current = session.current()
    if current is None or current.world.size == 1:
        return original(parser, [f"{declared[0]}={local_rank}", *words], *rest, **kwargs)
    parsed: tuple[argparse.Namespace, list[str]] = original(parser, words, *rest, **kwargs)
    value = parser._get_value(action, str(local_rank))
    session.at_opt_out(partial(setattr, parsed[0], action.dest, value))
    return parsed
