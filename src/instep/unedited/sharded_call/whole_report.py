"""The line that tells which module every rank computes whole, and why."""

from __future__ import annotations

import re

from torch import nn

from instep.distributed.communication.transport import get_transport
from instep.process import print_line
from instep.unedited.sharded_call.plan.plan_cache import has_divided_calls, is_whole_by_itself
from instep.unedited.sharded_call.plan.whole_reasons import (
    FEW_ROWS,
    NO_ROWS,
    OTHER_ROWS,
    ReasonKind,
    WholeReason,
)
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_reported: set[tuple[str, str]] = set()


def reset_reported() -> None:
    """Print each line again when it is due."""
    _reported.clear()


def report_whole(module: nn.Module, why: WholeReason) -> None:
    """Print one line, once, on rank 0: what is not sharded, and why.

    It is not repeated for other sizes of a batch. That the batch is too small is not said of what
    is computed whole anyway, nor of its parts.
    """
    name = type(module).__name__
    kind = (name, re.sub(r"\d+", "", why.text))
    is_whole = call_state.whole_depth or is_whole_by_itself(module)
    if kind in _reported or (is_whole and why in (FEW_ROWS, NO_ROWS, OTHER_ROWS)):
        return
    _reported.add(kind)
    group = ShardGroup.of(get_transport())
    if group.transport.rank == 0:
        separator = " " if why.kind is ReasonKind.OF_ARGUMENTS else ": "
        text = why.text
        if group.is_virtual and why == FEW_ROWS:
            text = text.replace("ranks", "shards")
        which = f"{name} whole"
        if why.kind is not ReasonKind.OF_ARGUMENTS and has_divided_calls(module):
            which = f"some calls of {name} whole, while its others are divided"
        line = f"every rank computes {which}{separator}{text}."
        print_line(f"{line} [INS711]")
