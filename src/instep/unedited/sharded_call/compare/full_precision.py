"""A call under autocast, compared without it.

What half precision rounds is as large as what a row may get from the others: a hundredth of their
mean, say. In the precision of the parameters it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.numbers import on_any_rank
from instep.unedited.sharded_call.compare.call_comparison import CallComparison
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import Division
from instep.unedited.sharded_call.plan.module_properties import is_compiled
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_HALF = (torch.float16, torch.bfloat16)


def compare_without_autocast(
    comparison: CallComparison, division: Division, group: ShardGroup
) -> tuple[ShardingPlan | None, str]:
    """A plan by which a call under autocast is the same if it computes in float32; or why not.

    None and "" if autocast is off, and for a forward that cannot run without: it needs more memory,
    say, or turns autocast on. All is as the whole forward left it. Collective.
    """
    call, reference = comparison.call, comparison.reference
    devices = _devices_under_autocast(call)
    if not devices or all(p.dtype in _HALF for p in nn.Module.parameters(call.module)):
        return None, ""
    found, why = None, ""
    reference.before.restore()
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        if is_compiled(call.parts):  # it would be compiled anew
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observed(is_silent=True))
        in_float32 = _run_whole_in_float32(call, group)
        if not on_any_rank(in_float32 is None, group.transport):
            assert in_float32 is not None
            in_float32.sums, in_float32.stored = comparison.sums, comparison.stored
            in_float32.known_outputs = comparison.known_outputs
            found, why = in_float32.try_division(division)
    reference.after.restore()
    return None if found is None else found[0], why


def _run_whole_in_float32(call: BoundCall, group: ShardGroup) -> CallComparison | None:
    """None for a forward that cannot be run so."""
    with suppress(Exception), _refused_autocast():
        comparison = CallComparison(_with_float32(call), group)
        comparison.reference.compute_gradients()
        return comparison
    return None


def _devices_under_autocast(call: BoundCall) -> list[str]:
    tensors = [x for x in call.leaves if isinstance(x, Tensor)]
    devices = {x.device.type for x in (*tensors, *nn.Module.parameters(call.module))}
    return [device for device in sorted(devices) if torch.is_autocast_enabled(device)]


def _with_float32(call: BoundCall) -> BoundCall:
    """The same call with copies of its arguments of half precision."""
    copies: dict[int, Tensor] = {}

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in _HALF:
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().float().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return call.with_leaves([convert(leaf) for leaf in call.leaves])


@contextmanager
def _refused_autocast() -> Iterator[None]:
    """Inside, a forward that turns autocast on raises RuntimeError."""
    enter: Any = torch.autocast.__enter__  # an untyped function

    def refuse(context: torch.autocast) -> Any:
        entered = enter(context)
        if torch.is_autocast_enabled(context.device):
            context.__exit__(None, None, None)
            raise RuntimeError("the forward turns autocast on")
        return entered

    torch.autocast.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
