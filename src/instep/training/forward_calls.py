"""The calls of replicated models: the batch, the weight and the random seed of each.

A call is on a stack while it runs. After that it is tagged on the autograd graph of its outputs,
where backward finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn

from instep.errors import TrainingError
from instep.process.process_value import ProcessValue
from instep.process.torch_private.autograd import current_graph_task_id, is_transformed
from instep.training.autograd_graph import Root, next_nodes, tag, walk
from instep.training.batches.candidates import BatchCandidates
from instep.training.batches.registry import find_candidates
from instep.training.blocks import Block, tensor_leaves
from instep.training.pytree import find_tensors

Scope = Literal["global", "rank"]
"""Whether statistics or masks are those of the whole batch, or of each rank's rows."""


@dataclass(eq=False)
class ForwardCall:
    """One call of a replicated model, or a backward of some of them."""

    batch: BatchCandidates
    """The batches that it may belong to."""
    statistics: Scope | None = None
    """Of which rows batch normalisation takes the statistics."""
    dropout: Scope = "rank"
    """Whether dropout masks are those of the whole batch."""
    seed: int = 0
    """The seed of its random numbers: a function of the model's seed and the step."""
    draws: int = 0
    """How many dropout masks and other random numbers of the whole batch it has drawn."""
    drawn_shapes: int = 0
    """A checksum of their shapes without the rows, which are the same on all ranks."""
    weight: float | None = None
    """This rank's fraction of the batch's loss, if `instep.weight` has stated it."""
    weights: tuple[float, ...] | None = None
    """All ranks' fractions, if it has stated a denominator."""
    needs_gradients: bool = False
    """Whether a loss of its output may have a backward."""
    had_backward: bool = False
    """Whether a backward has found its output."""
    has_unused_weight: bool = False
    """Whether `instep.weight` has stated its weight after a backward, and none has followed."""
    replica: object = None
    """The replica that was called."""
    inputs: tuple[int, ...] = ()
    """The addresses of the tensors that it was called with."""
    saved_rng_states: list[Tensor] = field(default_factory=list)
    """The states of torch's generators before a call in training, to be restored after it."""
    arguments: tuple[nn.Module, Any, Any] | None = None
    """The module and what it was called with, while it runs."""
    caller: str = ""
    """The script's line that has called the module."""
    batch_dims: Any = None
    """What is known of this replica's draws (`draws.batch_dims`)."""
    trial: list[tuple[str, tuple[int, ...]]] | None = None
    """In a trial, the lines that draw, and the shapes."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that runs it: what others draw meanwhile is none of its draws."""

    @classmethod
    def of(cls, block: Block | None, statistics: Scope | None = None) -> ForwardCall:
        """A call for the rows of `block`."""
        return cls(BatchCandidates((block,)), statistics)

    @property
    def block(self) -> Block | None:
        """This rank's rows of its batch; None if no batch was ever sharded.

        Collective in some cases; raises UnknownBatchError (see BatchCandidates.resolve).
        """
        if len(self.batch.blocks) > 1 or self.batch.earlier:
            self.batch = BatchCandidates((self.batch.resolve(),))
        return self.batch.blocks[0]

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank has no rows, and runs only for the collectives."""
        return self.batch.is_placeholder

    def note_backward(self) -> None:
        """A backward has found its output."""
        self.had_backward, self.has_unused_weight = True, False


replica_of_part: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Every module of the replicated models."""
_stack: list[ForwardCall] = []
_roots = ProcessValue[tuple[Root, ...]](())
"""From which the running backward goes."""


class _EndedCalls:
    """The calls that ended last."""

    last: ForwardCall | None = None
    trained: ForwardCall | None = None
    """The last one that needs gradients."""

    def add(self, call: ForwardCall) -> None:
        self.last = call
        if call.needs_gradients:
            self.trained = call

    def clear(self) -> None:
        self.last = self.trained = None


_ended = _EndedCalls()


def backward_from(roots: Iterable[Root]) -> AbstractContextManager[object]:
    """While a backward from these runs, gradient checkpointing may make calls again."""
    return _roots.set_to(tuple(roots))


def find_recomputed(replica: object, arguments: object) -> ForwardCall | None:
    """The call of `replica` that gradient checkpointing makes again, in the running backward.

    Raises TrainingError where it may be one of several that have drawn random numbers.
    """
    if current_graph_task_id() == -1:
        return None
    inputs = _addresses(arguments)
    calls = [call for call in find_calls(_roots.value)[0] if call.replica is replica]
    calls = [call for call in calls if call.inputs == inputs] or calls
    if len(calls) > 1 and any(call.draws for call in calls):
        raise TrainingError(
            "gradient checkpointing makes a call of a replicated model again, and which of several "
            "cannot be told, so neither can its dropout masks. Call torch.utils.checkpoint inside "
            "of the model's forward, or backward once for each call."
        )
    return calls[0] if calls else None


def _addresses(arguments: object) -> tuple[int, ...]:
    leaves = [each for each in tensor_leaves(arguments) if not is_transformed(each)]
    return tuple(each.data_ptr() for each in leaves if each.layout is torch.strided)


def push(call: ForwardCall) -> None:
    """Begin a call; calls nest. Raises TrainingError if the weight of the last one is unused."""
    trained = _ended.trained
    if call.needs_gradients and trained is not None and trained.has_unused_weight:
        trained.has_unused_weight = False
        raise TrainingError(
            "instep.weight was called after a backward, and so states the denominator of the "
            "forward before it, of which no backward followed. Call it between the forward and the "
            "backward of the same batch: loss = loss_function(model(x), y); instep.weight(count); "
            "loss.backward()."
        )
    if call.arguments is not None:
        call.inputs = _addresses(call.arguments[1:])
    _stack.append(call)


def pop() -> ForwardCall:
    """End the innermost call."""
    call = _stack.pop()
    _ended.add(call)
    return call


def drop() -> None:
    """End the innermost call, which was none of the script's."""
    _stack.pop()


def current() -> ForwardCall | None:
    """The innermost call that runs now."""
    return _stack[-1] if _stack else None


def last() -> ForwardCall | None:
    """The innermost call that runs now, else the one that ended last."""
    return current() or _ended.last


def last_trained() -> ForwardCall | None:
    """The innermost call that runs now, else the one that needs gradients and ended last."""
    return current() or _ended.trained or _ended.last


def current_candidates(values: object = ()) -> BatchCandidates:
    """The batches to which a call at this moment may belong; outside of a replica by these values'
    rows."""
    call = current()
    return find_candidates(values) if call is None else call.batch


def note_shape(call: ForwardCall | None, shape: tuple[int, ...], dim: int) -> None:
    """A call has drawn this shape, which has the rows in this dimension."""
    if call is not None:
        text = repr((dim, shape[:dim], shape[dim + 1 :]))
        call.drawn_shapes = crc32(text.encode(), call.drawn_shapes)


# ------------------------------------------------------------------------- tags on the graph

_TAG = "instep.call"


def tag_outputs(outputs: object, call: ForwardCall) -> None:
    """Write on the autograd graph that these outputs come from `call`."""
    tag(find_tensors(outputs), _TAG, call)


def find_calls(
    roots: Iterable[Root], parameters: Container[Tensor] = ()
) -> tuple[list[ForwardCall], bool]:
    """The calls from which these tensors were computed, and whether any of `parameters` was used.

    Goes down the graph as far as tagged outputs: in a training step a handful of nodes.
    """
    found: dict[ForwardCall, None] = {}
    used = False

    def visit(node: Any) -> Iterable[Any]:
        nonlocal used
        call = node.metadata.get(_TAG)
        if call is not None:
            found[call] = None
            used = True
            return ()
        variable = getattr(node, "variable", None)
        if variable is not None and variable in parameters:
            used = True
        return next_nodes(node)

    walk(roots, visit)
    return list(found), used


@contextmanager
def map_output_grads(roots: Iterable[Root], function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, a backward from these tensors gives the calls from which they were computed
    `function` of their outputs' gradients."""
    handles = []

    def change(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else function(grad) for grad in grads)

    def visit(node: Any) -> Iterable[Any]:
        if _TAG not in node.metadata:
            return next_nodes(node)
        handles.append(node.register_prehook(change))
        return ()

    walk(roots, visit)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_OF_ALL_RANKS = tuple(
    f"_{each}Backward" for each in ("AllGather", "Exchange", "AllReduce", "MinMax")
)
"""The nodes of `all_gather` and `all_reduce`."""


def depends_on_call(node: Any) -> bool:
    """Whether a call's output leads to this node of a graph, other than by what `all_gather` and
    `all_reduce` give, which is of all ranks' rows."""
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        if _TAG in node.metadata:
            return True
        if node.name() in _OF_ALL_RANKS:
            continue
        following = {each for each in next_nodes(node) if each is not None} - seen
        seen |= following
        stack += following
    return False


def find_leaves(roots: Iterable[Root]) -> list[Tensor]:
    """The tensors whose gradients a backward from these computes; through the whole graph."""
    found: list[Tensor] = []

    def visit(node: Any) -> Iterable[Any]:
        variable = getattr(node, "variable", None)
        found.extend(() if variable is None else (variable,))
        return next_nodes(node)

    walk(roots, visit)
    return found
