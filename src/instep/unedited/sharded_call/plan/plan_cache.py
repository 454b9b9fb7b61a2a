"""The plans of a module's calls, and which calls share one.

Calls share an entry if they agree in their key (training or not, with gradients or without, the
arguments' structure, dtypes and flags, strings for the whole batch). Within an entry, calls with
other sizes or other numbers are compared anew, the first few of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import nn

from instep.distributed.numbers import gather_values
from instep.training.pytree import Structure, is_cache
from instep.unedited.sharded_call.plan.bound_call import BoundCall, is_text, kind_of
from instep.unedited.sharded_call.plan.cache_entry import CacheEntry
from instep.unedited.sharded_call.plan.call_tuner import gain
from instep.unedited.sharded_call.plan.module_state import attribute_changes, temporary_modules
from instep.unedited.sharded_call.plan.module_state.attribute_changes import AttributeChanges
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
from instep.unedited.sharded_call.plan.whole_reasons import ReasonKind, WholeReason
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

MAX_TEXTS, MAX_ENTRIES = 16, 64
"""So many strings for the whole batch, and entries in all, are remembered of a module; calls
of others are computed whole."""

_TOO_MANY_TEXTS = WholeReason(
    f"more than {MAX_TEXTS} different strings came with its batches, and each may change what it "
    "does (a list with one string per row is divided with the rows)"
)
_TOO_MANY_ENTRIES = WholeReason(f"it was called with more than {MAX_ENTRIES} kinds of arguments")


@dataclass(eq=False)
class _ModulePlans:
    """What is known of the calls of one module."""

    why_temporary: WholeReason | None
    """Why none of them is compared; None if they are."""
    entries: list[CacheEntry] = field(default_factory=list)
    readings: list[Structure] = field(default_factory=list)
    """The structures of arguments that are read by the entries of their lists."""


_plans: WeakKeyDictionary[nn.Module, _ModulePlans] = WeakKeyDictionary()


def lookup(call: BoundCall, group: ShardGroup) -> CacheEntry:
    """The entry of a call, the same on all ranks; a new one if there is none. Collective where
    attributes of the module have changed lately."""
    attributes = attribute_changes.changes_of(call.module)
    if attributes is None:
        return _find(call, group.size, None)
    attributes.update()
    entry = _find(call, group.size, attributes)
    if not attributes.is_watched or group.transport.size == 1:
        return entry
    return _agree(entry, call, attributes, group)


def _agree(
    entry: CacheEntry, call: BoundCall, attributes: AttributeChanges, group: ShardGroup
) -> CacheEntry:
    """Agree on one entry, whose call all ranks compare or none does. Collective.

    A progress bar, or a text with a speed, changes by the clock: not at the same calls on all
    ranks, or to other values. Such attributes are not looked at any more.
    """
    transport, entries = group.transport, _plans[call.module].entries
    place = entries.index(entry) if entry in entries else -1
    changed = crc32(repr(sorted(map(repr, attributes.recent.items()))).encode())
    changed = changed if attributes.recent else 0
    mine = (place, entry.has_due_attributes(), changed)
    by_rank = gather_values(mine, transport)
    if any(map(itemgetter(-1), by_rank)):
        attributes.keep_watching()
    if by_rank.count(by_rank[0]) == len(by_rank):
        return entry
    changes = transport.all_gather_object(attributes.recent)
    keys = {key for of_rank in changes for key in of_rank}
    attributes.ignore(k for k in keys if len({of_rank.get(k) for of_rank in changes}) > 1)
    if entry.calls == 0 and place >= 0:
        entries.remove(entry)
    entry = _find(call, group.size, attributes)
    entry.is_in_doubt = True
    return entry


def read(call: BoundCall) -> BoundCall:
    """The call, read by the entries of lists where calls like it were divided so."""
    plans = _plans.get(call.module)
    if plans is None or not plans.readings:
        return call
    readings = map(call.by_entries, call.list_lengths())
    return next((each for each in readings if each.structure in plans.readings), call)


def note_reading(entry: CacheEntry, call: BoundCall, group: ShardGroup) -> None:
    """Remember that calls like this one, whose entry this is, are read as it is."""
    _plans[call.module].readings.append(call.structure)
    entry.is_new(call, group.size)
    attributes = attribute_changes.changes_of(call.module)
    entry.key = _keys_of(call, group.size, attributes)


def _keys_of(
    call: BoundCall, size: int, attributes: AttributeChanges | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What calls have in common that share an entry, and their strings."""
    key: tuple[Any, ...] = (
        (call.rows < size, call.has_short_first(size)),  # what one row forbids, many may allow
        call.module.training,
        torch.is_grad_enabled(),
        call.structure,
        tuple([kind_of(leaf, call.rows) for leaf in call.leaves]),
    )
    texts = tuple([leaf for leaf in call.leaves if is_text(leaf, call.rows)])
    if attributes is not None and attributes.flags:
        key = (*key, attributes.flags)
    return key, texts


def _find(call: BoundCall, size: int, attributes: AttributeChanges | None) -> CacheEntry:
    key, texts = _keys_of(call, size, attributes)
    plans = _plans.get(call.module)
    if plans is None:
        why_temporary = temporary_modules.find_reason(call.module)
        plans = _plans[call.module] = _ModulePlans(why_temporary)
    entries = plans.entries
    for entry in entries:
        if entry.key == (key, texts):
            return entry
    if len(entries) >= MAX_ENTRIES:
        return CacheEntry((), why_whole=_TOO_MANY_ENTRIES)
    if texts and sum(entry.key[0] == key for entry in entries) >= MAX_TEXTS:
        return CacheEntry((), why_whole=_TOO_MANY_TEXTS)
    entry = CacheEntry(
        (key, texts),
        why_whole=plans.why_temporary,
        is_temporary=plans.why_temporary is not None,
        has_parts=not is_compiled([call.module]),
    )
    if caches := [leaf for leaf in call.leaves if is_cache(leaf)]:
        entry.why_whole = WholeReason(
            f"where it is given a {type(caches[0]).__name__}, which it changes, as in generate(); "
            "other calls are not affected",
            ReasonKind.OF_ARGUMENTS,
        )
        entry.has_parts &= torch.is_grad_enabled()
    entries.append(entry)
    return entry


def is_whole_by_itself(module: nn.Module) -> bool:
    """Whether calls of the module were found to be whole whatever their arguments are."""
    reasons = [entry.why_whole for entry in _entries_of(module)]
    return any(why is not None and why.kind is not ReasonKind.OF_ARGUMENTS for why in reasons)


def has_divided_calls(module: nn.Module) -> bool:
    """Whether calls of the module with some arguments are divided."""
    return any(entry.plan is not None for entry in _entries_of(module))


def compare_others(entry: CacheEntry, module: nn.Module) -> None:
    """Let the next calls with other keys be compared: of this one a comparison has failed."""
    for each in _entries_of(module):
        each.is_in_doubt = each is not entry


def _entries_of(module: nn.Module) -> list[CacheEntry]:
    plans = _plans.get(module)
    return [] if plans is None else plans.entries


def clear() -> None:
    """Forget all plans."""
    _plans.clear()
    temporary_modules.clear()
    gain.reset()
    attribute_changes.clear()
