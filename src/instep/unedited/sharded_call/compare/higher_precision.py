"""A call compared in a higher precision than its own.

Under autocast or with TF32 it is in that of the parameters. What these round is as large as what a
row may get from the others: a hundredth of their mean, say. And where gradients in float32 are
another rounding's (those of deep nets whose batch normalisation sees few numbers), in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.distributed.numbers import on_any_rank
from instep.process.patching import replaced
from instep.process.torch_private.devices import fp32_precision, set_fp32_precision
from instep.training.pytree import flatten, unflatten
from instep.unedited.sharded_call.compare.call_comparison import CallComparison
from instep.unedited.sharded_call.compare.rounding import SINGLE, float32_computed_in
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import Division, is_entries
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
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


def compare_in_float64(
    comparison: CallComparison, division: Division, group: ShardGroup
) -> ShardingPlan | None:
    """A plan by which a call that computes in float32 is the same, gradients included, if it
    computes in float64; None if there is none. All is as the whole forward left it. Collective.
    """
    call, reference = comparison.call, comparison.reference
    if is_compiled(call.parts) or _is_in_lower_precision(call):
        return None
    reference.before.restore()
    with observed(is_silent=True), _parameters_in_float64(call.parts):
        in_float64 = _run_whole_in_float64(call, group)
        found = None
        if not on_any_rank(in_float64 is None, group.transport):
            assert in_float64 is not None
            in_float64.sums, in_float64.known_outputs = comparison.sums, comparison.known_outputs
            found, _ = in_float64.try_division(division)
    reference.after.restore()
    return None if found is None else found[0]


def _run_whole_in_float64(call: BoundCall, group: ShardGroup) -> CallComparison | None:
    """None for a forward that cannot be run so."""
    with suppress(Exception):
        comparison = CallComparison(_converted(call, (torch.float32,), torch.float64), group)
        comparison.reference.compute_gradients()
        return comparison
    return None


@contextmanager
def _parameters_in_float64(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, copies in float64 stand in for the parameters and buffers of float32 in the tables
    of these modules, and new tensors are of float64."""
    tables: list[dict[str, Any]] = [
        table for part in parts for table in (part._parameters, part._buffers)
    ]
    saved = [dict(table) for table in tables]
    copies: dict[int, Tensor] = {}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.dtype != torch.float32:
                    continue
                if id(tensor) not in copies:
                    copy = tensor.detach().double()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    copies[id(tensor)] = (
                        nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                    )
                table[name] = copies[id(tensor)]
        yield
    finally:
        torch.set_default_dtype(default)
        for table, kept in zip(tables, saved, strict=True):
            table.update(kept)


def _run_whole_in_float32(call: BoundCall, group: ShardGroup) -> CallComparison | None:
    """None for a forward that cannot be run so."""
    with suppress(Exception), _refused_autocast():
        comparison = CallComparison(_converted(call, _HALF, torch.float32), group)
        comparison.reference.compute_gradients()
        return None if _is_in_lower_precision(call) else comparison
    return None


def _tensors_of(call: BoundCall) -> list[Tensor]:
    return [*call.tensors, *nn.Module.parameters(call.module)]


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


def _converted(call: BoundCall, dtypes: Sequence[torch.dtype], to: torch.dtype) -> BoundCall:
    """The call with copies of its arguments of these dtypes."""
    copies: dict[int, Tensor] = {}

    def convert(leaf: Any) -> Any:
        if is_entries(leaf):
            inside, structure = flatten(leaf)
            return unflatten(map(convert, inside), structure)
        if isinstance(leaf, np.ndarray) and f"torch.{leaf.dtype}" in map(str, dtypes):
            return leaf.astype(str(to).removeprefix("torch."))
        if not isinstance(leaf, Tensor) or leaf.dtype not in dtypes:
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().to(to).requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return call.with_leaves([convert(leaf) for leaf in call.leaves])


def _refused_autocast() -> AbstractContextManager[None]:
    """Inside, a forward that turns autocast on raises RuntimeError."""
    enter: Any = torch.autocast.__enter__  # an untyped function

    def refuse(context: torch.autocast) -> Any:
        entered = enter(context)
        if torch.is_autocast_enabled(context.device):
            context.__exit__(None, None, None)
            raise RuntimeError("the forward turns autocast on")
        return entered

    return replaced((torch.autocast, "__enter__", refuse))
