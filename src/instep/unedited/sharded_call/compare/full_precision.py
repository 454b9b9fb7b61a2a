"""A call under autocast or with TF32, compared without these.

What they round is as large as what a row may get from the others: a hundredth of their mean, say.
In the precision of the parameters it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.numbers import on_any_rank
from instep.process.torch_private import fp32_precision, set_fp32_precision
from instep.unedited.sharded_call.compare.call_comparison import CallComparison
from instep.unedited.sharded_call.compare.rounding import SINGLE, float32_computed_in
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import Division
from instep.unedited.sharded_call.plan.module_properties import is_compiled
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_HALF = (torch.float16, torch.bfloat16)
_ALL = ("generic", "all")
_SETTINGS = (_ALL, *product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn")))
"""By backend and kind of operation, each behind the ones from which it may follow."""


def compare_in_full_precision(
    comparison: CallComparison, division: Division, group: ShardGroup
) -> tuple[ShardingPlan | None, str]:
    """A plan by which a call of lower precision is the same if it computes in float32; or why not.

    None and "" for a call that computes so anyway, and for a forward that cannot: it needs more
    memory, say, or turns autocast or TF32 on. All is as the whole forward left it. Collective.
    """
    call, reference = comparison.call, comparison.reference
    if not _is_in_lower_precision(call):
        return None, ""
    found, why = None, ""
    reference.before.restore()
    with ExitStack() as stack:
        for device in _devices_of(call):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(full_float32())
        if is_compiled(call.parts):  # it would be compiled anew
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observed(is_silent=True))
        in_float32 = _run_whole_in_float32(call, group)
        if not on_any_rank(in_float32 is None, group.transport):
            assert in_float32 is not None
            in_float32.sums, in_float32.stored = comparison.sums, comparison.stored
            in_float32.known_outputs = comparison.known_outputs
            found, why = in_float32.try_division(division)
            comparison.progress = in_float32.progress
    reference.after.restore()
    return None if found is None else found[0], why


def _run_whole_in_float32(call: BoundCall, group: ShardGroup) -> CallComparison | None:
    """None for a forward that cannot be run so."""
    with suppress(Exception), _refused_autocast():
        comparison = CallComparison(_with_float32(call), group)
        comparison.reference.compute_gradients()
        return None if _is_in_lower_precision(call) else comparison
    return None


def _tensors_of(call: BoundCall) -> list[Tensor]:
    arguments = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    return [*arguments, *nn.Module.parameters(call.module)]


def _devices_of(call: BoundCall) -> list[str]:
    return sorted({tensor.device.type for tensor in _tensors_of(call)})


def _is_in_lower_precision(call: BoundCall) -> bool:
    """Whether it may compute with fewer bits than its parameters have, here and now."""
    if all(parameter.dtype in _HALF for parameter in nn.Module.parameters(call.module)):
        return False
    if any(map(torch.is_autocast_enabled, _devices_of(call))):
        return True
    devices = {tensor.device.type for tensor in _tensors_of(call) if tensor.dtype in SINGLE}
    return any(float32_computed_in(device) is not torch.float32 for device in devices)


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, nothing of float32 is computed in TF32 or bfloat16.

    A setting is changed only if it does not follow from the one above it, which it will follow
    afterwards, too. PyTorch's older settings have to agree with these, or it raises an error.
    """
    changed: dict[tuple[str, str], str] = {}
    for key in _SETTINGS:
        if key == _ALL or fp32_precision(*key) != "ieee":
            changed[key] = fp32_precision(*key)
            set_fp32_precision(*key, "ieee")
    older = torch.get_float32_matmul_precision()
    if older != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if older != "highest":
            torch.set_float32_matmul_precision(older)
            changed = {key: "ieee" for key in _SETTINGS if "matmul" in key} | changed
        for key in reversed(_SETTINGS):
            if key in changed:
                set_fp32_precision(*key, changed[key])


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
