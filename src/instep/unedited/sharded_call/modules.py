"""The entry: nn.Module.__call__, of which the outermost call is sharded where that is the same."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.recorder import phase
from instep.distributed.identity.torch_devices import is_capturing_graph
from instep.process.patching import Function
from instep.process.torch_private import peek_interpreter_stack
from instep.training.draws.kernels import release_if_idle
from instep.unedited.sharded_call import own_forward
from instep.unedited.sharded_call.compare.equivalence import find_plan, verify_plan
from instep.unedited.sharded_call.compare.rank_mismatch import arguments_mismatch
from instep.unedited.sharded_call.compare.side_effects import SIDE_EFFECTS
from instep.unedited.sharded_call.compare.snapshot import CHANGES_PARAMETERS, MAKES_PARTS
from instep.unedited.sharded_call.compare.zero_outputs import run_with_zeros
from instep.unedited.sharded_call.plan import plan_cache, temporary_modules, whole_calls
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.call_tuner import CallTuner
from instep.unedited.sharded_call.plan.division import count_elements, max_rows
from instep.unedited.sharded_call.plan.module_properties import (
    find_gpu_state,
    find_hooks,
    has_parameters,
    has_work,
    ignore_grad_warnings,
    is_compiled,
    is_lazy,
)
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.plan.stored_parameters import MOVED
from instep.unedited.sharded_call.plan.whole_calls import WholeCall
from instep.unedited.sharded_call.run import timed_calls
from instep.unedited.sharded_call.run.backward import start_work
from instep.unedited.sharded_call.run.execution import run_sharded
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.run.timed_calls import run_timed, time_run
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_FIRST_CALLS = 3
_IN_FIRST_CALL = (*SIDE_EFFECTS, *CHANGES_PARAMETERS)
"""What many do in their first call only."""
_CALLS_WITH_ZEROS = 64
"""So many calls of which an output was zero so far are made anew where it no longer is."""
_IDLE_CALLS = 256
"""After so many whole calls it is looked whether any other call still draws for the whole batch."""
_FEW_ROWS = "where a batch has fewer rows than there are ranks; other batches are not affected"

_CHECKPOINTED = (
    "torch.utils.checkpoint(use_reentrant=False) calls it outside of a divided call, and must find "
    "the same tensors again"
)
_CAPTURED = "a CUDA graph captures it, which is replayed without Python"


@dataclass
class CallCounts:
    """This rank's module calls so far."""

    sharded: int = 0
    """Calls of which it computed its own rows."""
    whole: int = 0
    """Calls that every rank computed whole."""
    samples: int = 0
    """Rows that went through this rank's modules with gradients enabled."""


call_counts = CallCounts()
_reported: set[tuple[str, str]] = set()


def module_call(original: Function) -> Function:
    """In place of nn.Module.__call__: sharded if it is an outermost call of a module with
    parameters.

    Where that cannot be, the module's parts are, unless they are single layers with little work.
    """

    @functools.wraps(original)
    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or call_state.inside
            or torch.jit.is_tracing()  # to look at an argument's shape would be an operation, too
            or (call_state.whole_depth and not module._modules and not has_work(module, args))
            or threading.current_thread() is not threading.main_thread()
            or is_rank_local()  # a sample that only this rank loads, or a loader's worker
        ):
            return original(module, *args, **kwargs)
        if (known := whole_calls.find(module, args, kwargs)) is not None:
            return _run_known_whole(known, original, module, args, kwargs)
        return _call_unknown(original, module, args, kwargs)

    return call_module


def _call_unknown(
    original: Function, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if (
        peek_interpreter_stack() is not None  # torch.func's transforms
        or not has_parameters(module)
    ):
        return original(module, *args, **kwargs)
    call = BoundCall.of(original, module, args, kwargs)
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.is_nested for tensor in tensors):
        return original(module, *args, **kwargs)
    call_state.inside = True
    try:
        name = "forward" if torch.is_grad_enabled() else "evaluation"
        with ignore_grad_warnings(call.parts), phase(name):
            return _call_outermost(call, ShardGroup.of(get_transport()))
    finally:
        call_state.inside = False


def _call_outermost(call: BoundCall, group: ShardGroup) -> Any:
    """Plan the call, compare it with the whole one where that is due, and run it."""
    whole_calls.undecided += 1
    if call_state.is_checkpointed or is_capturing_graph():
        _report_whole(call.module, _CHECKPOINTED if call_state.is_checkpointed else _CAPTURED)
        _count_whole(call)
        return call.run_whole()
    entry = plan_cache.lookup(call, group)
    entry.calls += 1
    if entry.plan is not None and not all(each.is_current() for each in entry.plan.stored):
        entry.plan, entry.why_whole = None, MOVED
    hooked, hooks = find_hooks(call.module, call.parts)
    if entry.plan is None and not entry.why_whole:
        entry.why_whole = find_gpu_state(call.parts)
    if why := entry.why_whole or hooked:
        _report_whole(call.module, why)
        _count_whole(call)
        tuner = None if call_state.whole_depth else entry.parts_tuner(call)
        if entry.has_parts and tuner is not None:
            return _run_parts_or_whole(call, tuner, group, is_for_good=bool(entry.why_whole))
        if entry.why_whole:
            _remember_whole(call, None, by_parts=entry.has_parts)
        return _run_by_parts(call) if entry.has_parts else call.run_whole()
    if _count_batch(call, entry.plan) < group.size:
        _report_whole(call.module, _FEW_ROWS)
        _count_whole(call)
        _remember_whole(call, None, by_parts=False)
        return call.run_whole()
    tuner = entry.tuner(call)
    if tuner is not None and not (tuner.is_sharded or tuner.is_due):
        return _run_chosen_whole(call, tuner)
    if entry.plan is None and is_lazy(call.module):  # as nn.LazyLinear before its first call
        _count_whole(call)
        return call.run_whole()
    is_new = entry.is_new(call) or hooks != entry.hooks
    entry.hooks = hooks
    if entry.plan is None or is_new or (tuner is not None and tuner.is_due):
        whole_calls.trials += 1
    if entry.plan is None:
        entry.plan, output, entry.why_whole = find_plan(call, group)
        if entry.why_whole.startswith(MAKES_PARTS) and entry.calls <= plan_cache.MAX_COMPARED:
            _report_whole(call.module, f"{entry.why_whole} in this call")
            _count_whole(call)
            entry.why_whole = ""  # they are made by now
            return output
        if entry.why_whole and max_rows(call.leaves) < group.size:
            entry.why_whole = _FEW_ROWS
        if entry.why_whole.startswith(_IN_FIRST_CALL) and entry.calls < _FIRST_CALLS:
            entry.why_whole = ""
            _count_whole(call)
            return output
        if entry.why_whole != _FEW_ROWS:
            temporary_modules.note(call.module, entry.why_whole)
        if entry.plan is not None and entry.plan.sums_without_rows is not None:
            plan_cache.compare_others(entry, call.module)
    elif is_new or entry.is_sampled():
        entry.plan, output, entry.why_whole = verify_plan(call, entry.plan, group, gradients=is_new)
        if entry.why_whole:
            entry.why_whole += entry.divided_calls()
        entry.last_compared = entry.calls
    elif entry.is_checked() and (why := arguments_mismatch(call.leaves, group.transport) or ""):
        entry.why_whole, output = why + entry.divided_calls(), call.run_whole()
    elif tuner is not None and tuner.is_due:
        entry.plan, output, is_sharded = run_timed(call, entry.plan, tuner, group)
        if not is_sharded:
            tuner.count(count_elements(call.leaves), sharded=False)
            _count_whole(call)
            return output
    elif not entry.plan.has_values and entry.calls <= _CALLS_WITH_ZEROS:
        entry.plan, output, entry.why_whole = run_with_zeros(call, entry.plan, group)
    else:
        entry.plan, output = run_sharded(call, entry.plan, group)
    if entry.why_whole:
        entry.plan = None
        plan_cache.compare_others(entry, call.module)
        _report_whole(call.module, entry.why_whole)
        _count_whole(call)
    else:
        assert entry.plan is not None
        _count_sharded(call, entry.plan, group)
        if tuner is not None:
            tuner.count(count_elements(call.leaves), sharded=True)
    entry.finish(call.module)
    return output


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
        whole_calls.undecided += 1  # it will be timed again
    call_state.inside = True
    try:
        if known.by_parts:
            before = whole_calls.undecided
            with _sharding_parts(module):
                output = original(module, *args, **kwargs)
            known.by_parts = whole_calls.undecided > before
            return output
        return original(module, *args, **kwargs)
    finally:
        call_state.inside = False


def _run_parts_or_whole(
    call: BoundCall, tuner: CallTuner, group: ShardGroup, *, is_for_good: bool
) -> Any:
    """Shard the parts of a call that is whole, or not, by what takes less time.

    What a part costs is known only in part where its rows stay on their ranks: joining them may
    be left to what follows. So when all parts have decided, the whole call is timed both ways.
    """
    if not (tuner.is_due or tuner.is_sharded):
        tuner.count(count_elements(call.leaves), sharded=False)
        if is_for_good:
            _remember_whole(call, tuner, by_parts=False)
        return call.run_whole()

    def run(by_parts: bool) -> tuple[None, Any]:
        return None, _run_by_parts(call) if by_parts else call.run_whole()

    if tuner.begins_later:
        undecided, trials = whole_calls.undecided, whole_calls.trials
        _, output = run(True)
        if is_for_good and whole_calls.undecided == undecided:  # no part is ever sharded
            _remember_whole(call, None, by_parts=False)
        tuner.begins_later = whole_calls.trials > trials
        return output
    is_sharded = True
    if tuner.is_due:
        (_, output), is_sharded = time_run(call, tuner, group.transport, run)
    else:
        _, output = run(True)
    tuner.count(count_elements(call.leaves), sharded=is_sharded)
    return output


def _run_chosen_whole(call: BoundCall, tuner: CallTuner) -> Any:
    """It takes less time whole: so do its parts."""
    tuner.count(count_elements(call.leaves), sharded=False)
    _count_whole(call)
    _remember_whole(call, tuner, by_parts=False)
    return call.run_whole()


def _remember_whole(call: BoundCall, tuner: CallTuner | None, *, by_parts: bool) -> None:
    if is_compiled(call.parts):
        return
    rows = _count_batch(call, None) if torch.is_grad_enabled() else 0
    known = WholeCall(rows, count_elements(call.leaves), tuner, by_parts)
    whole_calls.add(call.module, call.args, call.kwargs, known)


def _run_by_parts(call: BoundCall) -> Any:
    with _sharding_parts(call.module):
        return call.run_whole()


@contextmanager
def _sharding_parts(module: nn.Module) -> Iterator[None]:
    """Inside, in a whole call of this module, calls of its parts are sharded."""
    call_state.inside, call_state.whole_depth = False, call_state.whole_depth + 1
    try:
        with own_forward.as_calls(module):
            yield
    finally:
        call_state.inside, call_state.whole_depth = True, call_state.whole_depth - 1


def _count_sharded(call: BoundCall, plan: ShardingPlan, group: ShardGroup) -> None:
    call_counts.sharded += 1
    start_work()
    rows = plan.division.count_rows(call.leaves)
    assert rows is not None
    _count_samples(sum(block.count for block in group.blocks(rows)))


def _count_whole(call: BoundCall) -> None:
    call_counts.whole += 1
    _count_samples(_count_batch(call, None))


def _count_samples(rows: int) -> None:
    if torch.is_grad_enabled() and not call_state.whole_depth:
        call_counts.samples += rows


def _count_batch(call: BoundCall, plan: ShardingPlan | None) -> int:
    """How many rows this batch has; 0 where it cannot be said."""
    if plan is not None:
        return plan.division.count_rows(call.leaves) or 0
    sizes = [max(x.shape[:2]) for x in call.leaves if isinstance(x, Tensor) and x.dim()]
    return max(sizes, default=0)


def reset() -> None:
    """Forget all plans, and count from zero."""
    plan_cache.clear()
    whole_calls.clear()
    timed_calls.reset()
    _reported.clear()
    call_counts.__init__()  # type: ignore[misc]


def _report_whole(module: nn.Module, why: str) -> None:
    """Print one line, once, on rank 0: what is not sharded, and why.

    That the batch is too small is not repeated for each part of what is computed whole anyway.
    """
    name = type(module).__name__
    if (name, why) in _reported or (call_state.whole_depth and why == _FEW_ROWS):
        return
    _reported.add((name, why))
    group = ShardGroup.of(get_transport())
    if group.transport.rank == 0:
        separator = " " if why.startswith("where ") else ": "
        if group.is_virtual and why == _FEW_ROWS:
            why = why.replace("ranks", "shards")
        line = f"every rank computes {name} whole{separator}{why}."
        print(f"instep: {line} [INS711]", file=sys.stderr)
