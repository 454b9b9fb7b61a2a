"""The global batch's gradient, while backward still runs.

A loss that is a mean over this rank's rows has the weight count_r / count in the mean over the
batch, so the sum over ranks of weighted gradients is the gradient of the global batch. The weight
is applied once, at the root of backward: every term of the loss, penalties included, is scaled by
it, and nothing below the root needs to know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.recorder import phase
from instep.errors import TrainingError
from instep.process.patching import Function, Patch
from instep.process.torch_private.autograd import current_graph_task_id
from instep.training import forward_calls
from instep.training.accumulation import is_summing
from instep.training.autograd_graph import Root, roots_of
from instep.training.batches import progress, registry
from instep.training.batches.candidates import BatchCandidates
from instep.training.batches.noted_losses import note_losses
from instep.training.buckets.reducer import (
    BackwardState,
    is_reducing,
    reduce_during_backward,
    reducer_of,
)
from instep.training.drift.comparison import DriftCheck
from instep.training.drift.non_finite import FiniteCheck, zero_non_finite
from instep.training.errors import MixedBatchesError
from instep.training.forward_calls import ForwardCall, find_calls, find_leaves, map_output_grads
from instep.training.losses import averages
from instep.training.losses.closures import note_loss
from instep.training.losses.divisors import check_divisors, is_first_of_kind, may_be_by_whole


def weight(count: Tensor | float | None) -> None:
    """State what the loss of the last forward in training divides by, if that is not its rows.

        loss = cross_entropy(model(x), y, ignore_index=-1)
        instep.weight((y != -1).sum())
        loss.backward()

    Args:
        count: this rank's denominator: the tokens that are kept, the sum of the class weights of
            its targets... A number, or a tensor of one element. None for a loss that is a sum
            and divides by nothing (a penalty on the parameters in it must then be divided by
            `instep.world_size`, since every rank adds it).

    It is the weight of that one forward. If the loss has terms of several forwards, state it after
    each of them, or call backward for each term. Of a model whose gradients DDP, Horovod or Apex
    averages, it is the weight of the next backward.

    A forward without gradients, such as a teacher's, is passed over. Does nothing in an evaluation:
    where gradients are disabled, as they were in the last forward.

    Called after a backward it states the weight of another one through the same forward; if none
    follows, the next forward raises TrainingError.

    Collective. Raises TrainingError before the first forward of a replicated model; in a job of one
    rank only if there is such a model.
    """
    latest = forward_calls.last()
    if not torch.is_grad_enabled() and (latest is None or not latest.needs_gradients):
        return  # not collective: a rank without rows may have skipped the batch
    call = forward_calls.last_trained()
    is_averaged = bool(averages.externally_averaged) and (call is None or call.had_backward)
    if is_averaged:
        call = ForwardCall(averages.batch())
    elif call is None:
        if get_transport().size == 1 and not forward_calls.replica_of_part:
            return  # one rank averages nothing, by DDP or Horovod either
        raise TrainingError(
            "instep.weight states the denominator of a forward's loss; call the model first."
        )
    call.has_unused_weight = call.had_backward
    _state_weight(call, count)
    if is_averaged:
        averages.state_weight(_weight(call))


def _state_weight(call: ForwardCall, count: Tensor | float | None) -> None:
    if count is None:
        call.weight, call.weights = (0.0 if call.is_placeholder else 1.0), None
        return
    transport = get_transport()
    counts = torch.zeros(transport.size, device=transport.control_device, dtype=torch.float64)
    if not call.is_placeholder:
        counts[transport.rank] = torch.as_tensor(count).detach().reshape(())
    transport.all_reduce(counts, "sum").wait()
    total = counts.sum()
    # Where nothing is counted on any rank one process has no number either, and all of its penalty.
    call.weight = call.weights = None
    call.weights = tuple((counts / total).tolist()) if total else _weights(call)
    call.weight = call.weights[transport.rank]


# ------------------------------------------------------------------------ the root of backward


def backward(
    original: Function,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward for graphs that contain a replica; else the original.

    Raises MixedBatchesError, and TrainingError for create_graph=True.
    """
    rest = (retain_graph, create_graph, grad_variables, inputs)
    roots = roots_of(tensors)
    nested = current_graph_task_id() != -1  # reentrant checkpointing
    if nested:
        _check_outer_backward(roots)
    has_replicas = bool(reducer_of) or _has_replicas_without_parameters()
    if nested or not (has_replicas or averages.may_need_weight()):
        _note_averaged(() if nested else roots)
        with nullcontext() if nested else forward_calls.backward_from(roots):
            original(tensors, grad_tensors, *rest)
        return
    forwards, touched = find_calls(roots, reducer_of)
    if not touched:
        _backward_of_averages(original, roots, grad_tensors, rest)
        return
    if create_graph:
        raise TrainingError(
            "backward(create_graph=True) of a replicated model: the sum over ranks has no graph. "
            "If the inner gradient is that of inputs, take it by torch.autograd.grad(..., "
            "create_graph=True), then call backward. One of parameters is that of this rank's "
            "rows, and not of the batch."
        )
    for each in forwards:
        each.note_backward()
    call = _single_call(forwards)
    own_weight = _weight(call)
    note_loss(roots, own_weight)
    note_losses(roots, call.batch)
    if grad_tensors is None and call.weight is None:
        _check_divisors(roots, call)
    weighted = _multiply_grads(roots, grad_tensors, own_weight)
    with phase("backward"), forward_calls.backward_from(roots):
        _backward_of_replicas(original, roots, weighted, rest, call)


PATCH = Patch(torch.autograd, "backward", backward, compile="skip")
"""For all backward passes of this process."""


def _check_outer_backward(roots: tuple[Root, ...]) -> None:
    if not is_reducing() and reducer_of and find_calls(roots, reducer_of)[1]:
        raise TrainingError(
            "a replicated model was called inside of a reentrant checkpoint, where its gradients "
            "are not summed over the ranks; use use_reentrant=False, or replicate the model that "
            "calls the checkpoint."
        )


def _has_replicas_without_parameters() -> bool:
    """Where no replica has parameters: whether there are replicas at all, on several ranks."""
    return bool(forward_calls.replica_of_part) and get_transport().size > 1


def _backward_of_averages(
    original: Function, roots: tuple[Root, ...], grad_tensors: Any, rest: tuple[Any, ...]
) -> None:
    """Backward of a graph without a replica: gradients that are averaged later get their weight."""
    found = averages.find_weight(roots, get_transport()) if averages.may_need_weight() else None
    if found is None:
        _note_averaged(roots)
        original(roots, grad_tensors, *rest)
        return
    block, weight = found
    note_losses(roots, BatchCandidates((block,)))
    forward_calls.push(ForwardCall.of(block))
    try:
        original(roots, _multiply_grads(roots, grad_tensors, weight), *rest)
    finally:
        forward_calls.drop()
        registry.end_step()


def _note_averaged(roots: tuple[Root, ...]) -> None:
    if averages.externally_averaged and averages.batch().is_single:
        note_losses(roots, averages.batch())


def _backward_of_replicas(
    original: Function,
    roots: tuple[Root, ...],
    weighted: list[Tensor | None],
    rest: tuple[Any, ...],
    call: ForwardCall,
) -> None:
    forward_calls.push(call)  # gradient checkpointing runs parts of the forward again
    progress.current.note_backward()
    try:
        # The numbers of a placeholder may be anything; they are not used. A mean over no token is
        # no number, but its rows have gradients if others do: batch statistics are of all rows.
        is_placeholder = call.is_placeholder
        has_no_number = not is_placeholder and call.weight == 0 and not _are_finite(roots)
        is_unused, finite = is_placeholder or has_no_number, None
        if not is_unused:
            rows = call.batch.resolve_on_this_rank()
            finite = FiniteCheck(roots, rows, get_transport().rank)
        state = BackwardState(
            is_placeholder=is_placeholder,
            sync=is_summing(),
            has_no_number=has_no_number,
            finite_check=finite,
        )
        with (
            torch.autograd.set_detect_anomaly(False) if is_unused else nullcontext(),
            map_output_grads(roots, zero_non_finite) if has_no_number else nullcontext(),
            reduce_during_backward(state),
        ):
            original(roots, weighted, *rest)
        if state.sync:
            _end_checks(state, roots, call)
            if not state.reducers:
                _end_frozen(roots, call)
    finally:
        forward_calls.pop()
        registry.end_step()


def _are_finite(roots: Iterable[Root]) -> bool:
    return all(bool(root.isfinite().all()) for root in roots if isinstance(root, Tensor))


def _check_divisors(roots: tuple[Root, ...], call: ForwardCall) -> None:
    """Warn of a loss that is no mean over rows, where the models are compared, and at the first
    batches of other sizes. Collective."""
    check: DriftCheck | None = getattr(call.replica, "drift_check", None)
    if check is None or call.block is None or not is_summing():
        return
    is_first = is_first_of_kind(call.replica, call.block)
    if is_first or may_be_by_whole(call.replica) or check.is_due():
        check_divisors(call.replica, roots, call.block, get_transport(), reducer_of)


def _end_frozen(roots: tuple[Root, ...], call: ForwardCall) -> None:
    """Nothing was summed: what is trained through this call, if anything, is in no replica."""
    check: DriftCheck | None = getattr(call.replica, "drift_check", None)
    if check is not None and check.is_frozen_due():
        _note_outside(check, roots, call)


def _note_outside(check: DriftCheck, roots: tuple[Root, ...], call: ForwardCall) -> None:
    """Let the check know what has a gradient by this backward, and is in no replica."""
    block = call.block
    rows = [] if block is None else [replace(block, rank=r).count for r in range(block.size)]
    check.note_outside(each for each in find_leaves(roots) if each not in reducer_of)
    check.rows = {*rows}


def _end_checks(state: BackwardState, roots: tuple[Root, ...], call: ForwardCall) -> None:
    """The sums are in `.grad`: compare the models if it is time to. Collective."""
    checks = dict.fromkeys(reducer.drift_check for reducer in state.reducers)
    for check in checks:
        if check is not None:
            check.drawn_shapes = -1 if state.is_placeholder else call.drawn_shapes
            if check.is_due():
                _note_outside(check, roots, call)
            check.end_backward()
    if state.finite_check is not None:
        state.finite_check.end(checks)


def _single_call(forwards: list[ForwardCall]) -> ForwardCall:
    """The call whose rows and weight a backward has.

    All ranks decide the same: by the batches' sizes, never by their own fraction.
    """
    if not forwards:  # as where a hook has kept what a layer gave
        last = forward_calls.last_trained()
        if last is not None and last.weight is not None and not last.had_backward:
            return last
        return ForwardCall(forward_calls.current_candidates())
    stated = [call for call in forwards if call.weight is not None]
    first = (stated or forwards)[0]
    if len(forwards) > 1:
        weights = _weights(first)
        if not all(np.allclose(_weights(call), weights, 1e-9, 0) for call in forwards):
            raise MixedBatchesError(
                [_weight(call) for call in forwards], are_stated=len(stated) in (0, len(forwards))
            )
    return first


def _weights(call: ForwardCall) -> tuple[float, ...]:
    """All ranks' fractions of the batch's loss."""
    if call.weights is not None:
        return call.weights
    size = get_transport().size
    fractions = (1 / size,) * size if call.block is None else call.block.fractions()
    return fractions if call.weight is None else tuple(float(each > 0) for each in fractions)


def _weight(call: ForwardCall) -> float:
    """This rank's fraction of the batch's loss; an N-th if no batch was ever sharded."""
    if call.weight is not None:
        return call.weight
    return 1.0 / get_transport().size if call.block is None else call.block.fraction


def _multiply_grads(roots: tuple[Root, ...], grads: Any, weight: float) -> list[Tensor | None]:
    given = [grads] * len(roots) if grads is None or isinstance(grads, Tensor) else list(grads)
    result: list[Tensor | None] = []
    for root, grad in zip(roots, given, strict=True):
        if grad is None and isinstance(root, Tensor) and root.numel() == 1:
            result.append(torch.full_like(root, weight))
        else:
            result.append(None if grad is None else grad * weight)
    return result
