"""Times some calls sharded and some whole, with their backward, so that all ranks choose the same.

The ranks begin a timed step together and exchange what the step before took. Of many calls before
one backward() the first ones are timed, without it, and then those after it: steps that hold other
parts of such a sequence do not compare.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from instep.distributed.communication.tensors import as_bytes
from instep.distributed.communication.transport import Transport
from instep.distributed.numbers import gather_values
from instep.training.pytree import find_tensors
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.call_tuner import CallTuner, TimedStep
from instep.unedited.sharded_call.plan.sharding_plan import CallResult, ShardingPlan
from instep.unedited.sharded_call.run.execution import run_sharded
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

MAX_CALLS = 16
"""A step ends after so many calls of which none was reached by a backward()."""
_MAX_MISSED = 8
_MAX_SKIPPED = 64
"""After so many calls without a backward() the next step begins nevertheless."""


@dataclass
class _Backwards:
    """The calls of backward() by the script, and the steps that wait for one."""

    count: int = 0
    waiting: dict[TimedStep, weakref.ref[nn.Module]] = field(default_factory=dict)
    """And whose steps they are."""


_backwards = _Backwards()


def clock(device: torch.device) -> float:
    """Seconds; what runs on this device has ended."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return perf_counter()


def run_timed(
    call: BoundCall, plan: ShardingPlan, tuner: CallTuner, group: ShardGroup
) -> CallResult:
    """Make a call sharded or whole, and learn what that costs; or as is decided by now.
    Collective."""

    def run(is_sharded: bool) -> Any:
        nonlocal plan
        if not is_sharded:
            return call.run_whole()
        plan, output = run_sharded(call, plan, group)
        return output

    output, is_sharded = time_run(call, tuner, group.transport, run)
    return CallResult(output, plan, is_sharded=is_sharded)


def time_run(
    call: BoundCall, tuner: CallTuner, transport: Transport, run: Callable[[bool], Any]
) -> tuple[Any, bool]:
    """`run(is_sharded)` as the tuner needs it next, timed; or as is decided by now.

    Returns what the call returns, and whether it was sharded. Collective.
    """
    tuner.begin()
    step = tuner.step
    # After a step that ended by its number of calls the next one waits for a backward().
    is_in_sequence = step is not None and step.backwards == _backwards.count
    if is_in_sequence and tuner.skipped < _MAX_SKIPPED:
        tuner.skipped += 1
        return run(tuner.is_sharded), tuner.is_sharded
    tuner.skipped = 0
    if step is None or step.is_complete or step.is_reached:
        _exchange(tuner, transport)
        if tuner.is_decided:
            return run(tuner.is_sharded), tuner.is_sharded
        sharded = tuner.next_is_sharded()
        step = tuner.step = TimedStep(sharded, not sharded and tuner.needs_bits())
        _backwards.waiting[step] = weakref.ref(call.module)
    device = _device_of(call.tensors)
    start = clock(device)
    output = run(step.is_sharded)
    step.seconds += clock(device) - start
    step.calls += 1
    step.elements += call.elements
    outputs = find_tensors(output)
    if step.compares_bits:
        step.bits = _checksum(outputs, step.bits)
    if not _watch(step, outputs):
        _close(step)
    elif step.calls == MAX_CALLS:
        step.backwards = _backwards.count
        _close(step)
    return output, step.is_sharded


def start_backward() -> float | None:
    """The time, if a timed step waits for a backward()."""
    waiting = _backwards.waiting
    if not waiting:
        return None
    return clock(_device_of(p for module in waiting.values() for p in _parameters(module)))


def end_backward(start: float | None) -> None:
    """Share the time since then among the steps that this backward() has reached, by what their
    calls have taken."""
    _backwards.count += 1
    if start is None:
        return
    waiting = _backwards.waiting
    reached = [step for step in waiting if step.is_reached]
    forward = sum(step.seconds for step in reached) or 1.0
    seconds = 0.0
    if reached:
        seconds = clock(_device_of(p for s in reached for p in _parameters(waiting[s]))) - start
    for step in [*waiting]:
        if step.is_reached:
            if step.compares_bits:
                grads = [p.grad for p in _parameters(waiting[step]) if p.grad is not None]
                step.bits = _checksum(grads, step.bits)
            step.seconds += seconds * step.seconds / forward
            _close(step)
        else:
            step.missed += 1
            if step.missed == _MAX_MISSED:
                _close(step)


def reset() -> None:
    """Forget the steps that wait for a backward()."""
    _backwards.waiting.clear()


def _exchange(tuner: CallTuner, transport: Transport) -> None:
    """Tell all ranks what the last step took; the slowest counts."""
    step = tuner.step
    mine = (step.cost, float(step.bits)) if step else (0.0, 0.0)
    costs, bits = zip(*gather_values(mine, transport), strict=True)
    if step is not None:
        _close(step)
        same = len({*bits}) == 1 if step.compares_bits else None
        tuner.add(max(costs), sharded=step.is_sharded, same_bits=same)


def _close(step: TimedStep) -> None:
    step.is_complete = True
    _backwards.waiting.pop(step, None)


def _watch(step: TimedStep, outputs: Iterable[Tensor]) -> bool:
    """Find out when a backward() reaches these; returns whether one can."""
    nodes = {out.grad_fn for out in outputs if out.grad_fn is not None}

    def reach(_: Any) -> None:
        step.is_reached = True

    for node in nodes:
        node.register_prehook(reach)
    return bool(nodes)


def _parameters(module: weakref.ref[nn.Module]) -> list[nn.Parameter]:
    found = module()
    return [] if found is None else [*found.parameters()]


def _device_of(values: Iterable[Any]) -> torch.device:
    devices = [value.device for value in values if isinstance(value, Tensor)]
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


def _checksum(tensors: Iterable[Tensor], code: int) -> int:
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.layout is torch.strided:
            code = crc32(as_bytes(values).cpu().numpy().data, code)
    return code
