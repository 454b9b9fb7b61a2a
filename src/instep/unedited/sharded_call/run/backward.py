"""The script's `backward()`, in which sums over the ranks run while it still computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply
from instep.distributed.communication.transport import Transport, get_transport, overlap_group
from instep.distributed.flight_record.recorder import phase
from instep.errors import CollectiveError
from instep.process.patching import Function
from instep.process.process_value import ProcessValue
from instep.process.torch_private.autograd import (
    VMAP,
    current_graph_task_id,
    interpreter_stack,
    is_transformed,
)
from instep.process.torch_private.tensors import tree_flatten, tree_map_only, tree_unflatten
from instep.training.autograd_graph import Root, roots_of
from instep.training.drift.comparison import DriftCheck, drift_check_of
from instep.training.drift.non_finite import FiniteCheck
from instep.training.drift.whole_gradients import note_backward
from instep.training.errors import DriftError
from instep.training.pytree import find_tensors
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.one_process.fallback import current_fallback
from instep.unedited.sharded_call.plan.module_state.module_properties import find_user_of_data
from instep.unedited.sharded_call.plan.whole_calls import decision_counts
from instep.unedited.sharded_call.run.execution import wait_for_same_error
from instep.unedited.sharded_call.run.grad_sums import BucketedBackward, CallGradients
from instep.unedited.sharded_call.run.region import call_state, find_regions, has_regions
from instep.unedited.sharded_call.run.sharded_output import grad_of_outputs
from instep.unedited.sharded_call.run.timed_calls import end_backward, start_backward
from instep.unedited.sharded_call.run.whole_state import broadcast_whole_part, note_nested

_first_work = ProcessValue[Callable[[], None] | None](None)


def on_first_work(callback: Callable[[], None] | None) -> None:
    """Call `callback()` once, before the first sharded call's result or the first backward.

    From then on the ranks of a script cannot part any more. None: call nothing.
    """
    _first_work.value = callback


def start_work() -> None:
    """Run the callback of `on_first_work`, unless it has run before."""
    callback, _first_work.value = _first_work.value, None
    if callback is not None:
        callback()


def backward(
    original: Function,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward; sums in buckets where it ends in `.grad` of the parameters."""
    start_work()
    rest = (grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    roots = roots_of(tensors)
    if current_graph_task_id() != -1:  # nested
        if call_state.compares_gradients and inputs is None:
            raise ShardedCallError("its backward begins another one, as in reversible nets")
        note_nested(roots)
        original(tensors, *rest)
        return
    _run(partial(original, tensors, *rest), roots, create_graph, inputs)
    if (fallback := current_fallback()) is None:
        return
    if call_state.inside or call_state.whole_depth:
        fallback.ends_in_call = True
    else:
        fallback.end_backward(decision_counts.slow)


def _run(
    original: Callable[[], None], roots: Sequence[Root], create_graph: bool, inputs: Any
) -> None:
    """`original()`, a backward from these roots; the ranks sum the gradients of divided calls."""
    start = start_backward()
    can_reduce = has_regions() and not create_graph and inputs is None
    calls = [region.gradients for region in find_regions(roots)] if can_reduce else []
    note_backward(is_summed=bool(calls))
    whole_part = nullcontext() if create_graph else broadcast_whole_part(roots, inputs)
    if not calls:
        with whole_part:
            original()
        end_backward(start)
        return
    transport = get_transport()
    finite = FiniteCheck(roots, calls[0].block, transport.rank)
    sums = BucketedBackward(roots, calls, overlap_group(transport), finite)
    try:
        with phase("backward"), whole_part, sums:
            original()
    except CollectiveError:  # the others have one, too
        raise
    except Exception as error:
        wait_for_same_error(error, "backward()", transport)
        raise
    end_backward(start)
    # Not in the time of the backward, by which calls are tuned.
    finite.end(_compare_between_ranks(calls, transport))


def grad(
    original: Function,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """torch.autograd.grad, which also takes outputs of sharded calls for inputs."""
    take = partial(
        grad_of_outputs,
        original,
        outputs,
        inputs,
        create_graph=create_graph,
        only_inputs=only_inputs,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    if is_grads_batched and has_regions():  # what crosses the ranks cannot be vectorized
        return _grad_by_rows(take, grad_outputs, retain_graph)
    if has_regions() and not create_graph and _is_under_vmap(grad_outputs):
        return _grad_under_vmap(take, grad_outputs)
    return take(grad_outputs, retain_graph, is_grads_batched=is_grads_batched)


def _grad_by_rows(
    take: Callable[[Any, bool | None], Any], grad_outputs: Any, retain_graph: bool | None
) -> Any:
    """`take(grad_outputs, retain_graph)` of each row of `grad_outputs`, stacked."""
    count = next(len(each) for each in find_tensors(grad_outputs))
    rows = [
        take(tree_map_only(Tensor, itemgetter(k), grad_outputs), k + 1 < count or retain_graph)
        for k in range(count)
    ]
    if isinstance(rows[0], dict):
        return {name: _stack([row[name] for row in rows]) for name in rows[0]}
    return tuple(map(_stack, zip(*rows, strict=True)))


class _RowsOfVmap(torch.autograd.Function):
    """A function of tensors which torch.vmap calls for each of its rows."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Its outputs have no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], run: Any, *tensors: Tensor) -> Any:
        dims = in_dims[1:]
        rows = [
            apply(
                _RowsOfVmap,
                run,
                *(
                    each if dim is None else each.select(dim, k)
                    for each, dim in zip(tensors, dims, strict=True)
                ),
            )
            for k in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*rows, strict=True))), 0


def _is_under_vmap(grad_outputs: Any) -> bool:
    """Whether these are rows of a torch.vmap, and no derivative of torch.func is under way."""
    transforms = interpreter_stack() or ()
    is_vmap = all(transform.key() == VMAP for transform in transforms)
    return is_vmap and any(map(is_transformed, find_tensors(grad_outputs)))


def _grad_under_vmap(take: Callable[[Any, bool], Any], grad_outputs: Any) -> Any:
    """`take(grad_outputs, True)` of each row of a torch.vmap that is under way."""
    flat, structure = tree_flatten(grad_outputs)
    taken: Any = None

    def run(*grads: Tensor) -> tuple[Tensor, ...]:
        nonlocal taken
        taken = take(tree_unflatten([*grads], structure), True)
        return tuple(find_tensors(taken))

    found = iter(apply(_RowsOfVmap, run, *flat))
    return tree_map_only(Tensor, lambda _: next(found), taken)


def _stack(rows: Sequence[Tensor | None]) -> Tensor | None:
    found = [row for row in rows if row is not None]
    return torch.stack(found) if found else None


def _compare_between_ranks(calls: list[CallGradients], transport: Transport) -> list[DriftCheck]:
    """Compare the modules that were called, if it is time to. Collective. Raises DriftError."""
    modules = dict.fromkeys(call.module() for call in calls if call.module is not None)
    checks = {
        each: drift_check_of(each, transport, "compare", is_replica=False)
        for each in modules
        if each is not None
    }
    for module, check in checks.items():
        try:
            check.end_backward()
        except DriftError as error:
            if name := find_user_of_data(module):
                error.add_note(
                    f"instep: {name} names `.data`. If its forward changes a parameter so, by "
                    "some rows of the batch only, each rank changes it by its own rows: change it "
                    "outside of forward."
                )
            raise
    return [*checks.values()]
