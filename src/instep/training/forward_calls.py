"""The calls of replicated models: which batch each belongs to, and what was said about it.

A call is remembered in two places: on a stack while it is under way, and on the autograd graph of
its outputs until backward comes by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from instep.training.autograd_graph import next_nodes, tag, walk
from instep.training.batches import BatchCandidates, find_candidates
from instep.training.blocks import Block
from instep.training.pytree import find_tensors

Scope = Literal["global", "rank"]
"""Whether something is that of the whole batch, or of each rank's rows."""


@dataclass(eq=False)
class ForwardCall:
    """One call of a replicated model, or a backward through some."""

    batch: BatchCandidates
    """The batches that it may belong to."""
    statistics: Scope | None = None
    """Where batch statistics come from."""
    dropout: Scope = "rank"
    """Whether dropout masks depend on the rank."""
    stream: int = 0
    """The seed of its random numbers: a function of the model's seed and the step."""
    draws: int = 0
    """How many dropout masks it has drawn."""
    weight: float | None = None
    """What `instep.weight` stated: this rank's share of the batch's loss."""

    model: object = None
    """Whose call it is."""
    saved_rng_states: list[Tensor] = field(default_factory=list)
    """The states of torch's generators before a call in training, to be set again after it."""

    @classmethod
    def of(cls, block: Block | None, statistics: Scope | None = None) -> ForwardCall:
        """A call that works on the rows of `block`."""
        return cls(BatchCandidates((block,)), statistics)

    @property
    def block(self) -> Block | None:
        """The rows that it works on; None where no batch was ever divided.

        Collective in some cases; raises UnknownBatchError (see BatchCandidates.resolve).
        """
        if len(self.batch.blocks) > 1:
            self.batch = BatchCandidates((self.batch.resolve(),))
        return self.batch.blocks[0]

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank has no rows and only takes part."""
        return self.batch.is_placeholder


_under_way: list[ForwardCall] = []
_last: ForwardCall | None = None


def push(call: ForwardCall) -> None:
    """A call begins; calls nest."""
    _under_way.append(call)


def pop() -> ForwardCall:
    """The innermost call has ended."""
    global _last
    _last = _under_way.pop()
    return _last


def current() -> ForwardCall | None:
    """The innermost call under way."""
    return _under_way[-1] if _under_way else None


def last() -> ForwardCall | None:
    """The innermost call under way, else the one that ended last."""
    return current() or _last


def current_candidates() -> BatchCandidates:
    """The batches that this rank may be at work on now."""
    call = current()
    return find_candidates(()) if call is None else call.batch


# ------------------------------------------------------------------------- tags on the graph

_TAG = "instep.call"


def tag_outputs(outputs: object, call: ForwardCall) -> None:
    """Write on the autograd graph that these outputs come from `call`."""
    tag(find_tensors(outputs), _TAG, call)


def find_calls(
    roots: Iterable[Tensor], parameters: WeakTensorKeyDictionary
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
