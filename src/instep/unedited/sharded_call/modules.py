"""The entry: nn.Module.__call__, of which the outermost call is sharded where that is the same."""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.flight_record.recorder import phase
from instep.process import in_main_thread
from instep.process.patching import Function
from instep.process.torch_private.autograd import is_in_forward_ad, peek_interpreter_stack
from instep.training.draws.kernels import release_if_idle
from instep.unedited.sharded_call.counting import call_counts
from instep.unedited.sharded_call.one_process.fallback import current_fallback
from instep.unedited.sharded_call.outermost_call import call_outermost, sharding_parts
from instep.unedited.sharded_call.plan import plan_cache, whole_calls
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import has_rows
from instep.unedited.sharded_call.plan.module_state.module_properties import (
    has_parameters,
    has_work,
    ignored_grad_warnings,
    is_compiled,
    parts_of,
)
from instep.unedited.sharded_call.plan.whole_calls import WholeCall, decision_counts
from instep.unedited.sharded_call.plan.whole_reasons import ReasonKind, WholeReason
from instep.unedited.sharded_call.run import timed_calls
from instep.unedited.sharded_call.run.region import call_state, is_in_backward
from instep.unedited.sharded_call.run.whole_state import note_whole_call
from instep.unedited.sharded_call.shards.shard_group import GroupOfWorld
from instep.unedited.sharded_call.whole_report import report_whole, reset_reported

_NESTED = WholeReason(
    "where it is given a nested tensor; other calls are not affected", ReasonKind.OF_ARGUMENTS
)
_TRANSFORMED = WholeReason(
    "inside of a transform of torch.func (grad, vmap and so on); other calls are not affected",
    ReasonKind.OF_ARGUMENTS,
)
_FORWARD_AD = WholeReason(
    "where torch.autograd.forward_ad differentiates it; other calls are not affected",
    ReasonKind.OF_ARGUMENTS,
)
_IS_NESTED = attrgetter("is_nested")
_IDLE_CALLS = 256
"""After so many whole calls it is looked whether any other call still draws for the whole batch."""


def module_call(original: Function) -> Function:
    """In place of nn.Module.__call__: sharded if it is an outermost call of a module with
    parameters.

    Where that cannot be, the module's parts are, unless they are single layers with little work.
    """

    group = GroupOfWorld()

    @functools.wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or call_state.inside
            or torch.jit.is_tracing()  # to look at an argument's shape would be an operation, too
            or (call_state.whole_depth and not module._modules and not has_work(module, args))
            or not in_main_thread()
            or is_rank_local()  # a sample that only this rank loads, or a loader's worker
            or is_in_backward()
        ):
            return original(module, *args, **kwargs)
        fallback = None if call_state.whole_depth else current_fallback()
        if fallback is None:
            return _call(original, module, args, kwargs, group)
        if fallback.is_measuring:
            fallback.add_call()
        if fallback.computes_whole:
            call_counts.whole += 1
            with call_state.calling():
                output = original(module, *args, **kwargs)
        else:
            output = _call(original, module, args, kwargs, group)
        if fallback.ends_in_call:
            fallback.end_backward(decision_counts.slow)
        return output

    return forward


def _call(
    original: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: GroupOfWorld,
) -> Any:
    if (known := whole_calls.find(module, args, kwargs)) is not None:
        return _run_known_whole(known, original, module, args, kwargs)
    parts = parts_of(module)
    if not has_parameters(parts):
        return original(module, *args, **kwargs)
    if peek_interpreter_stack() is not None:
        return _run_whole_with_parts(_TRANSFORMED, original, module, args, kwargs)
    if is_in_forward_ad():
        return _run_whole_with_parts(_FORWARD_AD, original, module, args, kwargs)
    call = BoundCall.of(original, parts, args, kwargs)
    if any(map(_IS_NESTED, call.tensors)):
        return _run_whole_with_parts(_NESTED, original, module, args, kwargs)
    has_tensors = call.tensors or any(isinstance(leaf, np.ndarray) for leaf in call.leaves)
    if not (has_tensors or any(map(has_rows, call.leaves))):
        return original(module, *args, **kwargs)
    if not is_compiled(parts):
        return _run_outermost(call, group)
    with ignored_grad_warnings():
        return _run_outermost(call, group)


def _run_outermost(call: BoundCall, group: GroupOfWorld) -> Any:
    call_state.inside = True
    try:
        with phase("forward" if torch.is_grad_enabled() else "evaluation"):
            return call_outermost(call, group.now())
    finally:
        call_state.inside = False


def _run_whole_with_parts(
    why: WholeReason,
    original: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call that cannot be planned; those of the module's parts are looked at by
    themselves."""
    if not call_state.whole_depth:
        report_whole(module, why)
        call_counts.whole += 1
    with sharding_parts(module):
        return original(module, *args, **kwargs)


def _run_known_whole(
    known: WholeCall,
    original: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    call_counts.whole += 1
    if call_counts.whole % _IDLE_CALLS == 0:
        release_if_idle()
    if known.rows and not call_state.whole_depth:
        call_counts.samples += known.rows
    if known.tuner is not None:
        known.tuner.count(known.elements, sharded=False)
        decision_counts.undecided += 1  # it will be timed again
    if known.is_on_accelerator:
        note_whole_call(module)
    call_state.inside = True
    try:
        if known.by_parts:
            before = decision_counts.undecided
            with sharding_parts(module):
                output = original(module, *args, **kwargs)
            known.by_parts = decision_counts.undecided > before
            return output
        return original(module, *args, **kwargs)
    finally:
        call_state.inside = False


def reset() -> None:
    """Forget all plans, and count from zero."""
    plan_cache.clear()
    whole_calls.clear()
    timed_calls.reset()
    call_counts.reset()
    reset_reported()
