"""The line that tells which module every rank computes whole, and why."""

from __future__ import annotations

import re

from torch import nn

from instep.distributed.communication.transport import get_transport
from instep.process import print_line
from instep.unedited.sharded_call.plan.whole_reasons import ReasonKind, WholeReason
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

FEW_ROWS = WholeReason(
    "where a batch has fewer rows than there are ranks; other batches are not affected",
    ReasonKind.OF_ARGUMENTS,
)
NO_ROWS = WholeReason("where none of its arguments has rows", ReasonKind.OF_ARGUMENTS)
_reported: set[tuple[str, str]] = set()


def reset_reported() -> None:
    """Print each line again when it is due."""
    _reported.clear()


def report_whole(module: nn.Module, why: WholeReason) -> None:
    """Print one line, once, on rank 0: what is not sharded, and why.

    It is not repeated for other sizes of a batch. That the batch is too small is not repeated for
    each part of what is computed whole anyway.
    """
    name = type(module).__name__
    kind = (name, re.sub(r"\d+", "", why.text))
    if kind in _reported or (call_state.whole_depth and why in (FEW_ROWS, NO_ROWS)):
        return
    _reported.add(kind)
    group = ShardGroup.of(get_transport())
    if group.transport.rank == 0:
        separator = " " if why.kind is ReasonKind.OF_ARGUMENTS else ": "
        text = why.text
        if group.is_virtual and why is FEW_ROWS:
            text = text.replace("ranks", "shards")
        line = f"every rank computes {name} whole{separator}{text}."
        print_line(f"{line} [INS711]")
