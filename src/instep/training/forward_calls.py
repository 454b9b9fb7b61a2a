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

from instep.training.batches import Candidates, batch_of
from instep.training.blocks import Block
from instep.training.pytree import tensors_in

Scope = Literal["global", "rank"]
"""Whether something is that of the whole batch, or of each rank's rows."""


@dataclass(eq=False)
class Call:
    """One call of a replicated model, or a backward through some."""

    batch: Candidates
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
    outer_generators: list[Tensor] = field(default_factory=list)
    """The states of torch's generators before a call in training, to be set again after it."""

    @classmethod
    def of(cls, block: Block | None, statistics: Scope | None = None) -> Call:
        """A call that works on the rows of `block`."""
        return cls(Candidates((block,)), statistics)

    @property
    def block(self) -> Block | None:
        """The rows that it works on; None where no batch was ever divided.

        Collective in some cases; raises UnknownBatchError (see Candidates.resolve).
        """
        if len(self.batch.blocks) > 1:
            self.batch = Candidates((self.batch.resolve(),))
        return self.batch.blocks[0]

    @property
    def ghost(self) -> bool:
        """Whether this rank has no rows and only takes part."""
        return self.batch.ghost


_under_way: list[Call] = []
_latest: Call | None = None


def enter(call: Call) -> None:
    """A call begins; calls nest."""
    _under_way.append(call)


def leave() -> Call:
    """The innermost call has ended."""
    global _latest
    _latest = _under_way.pop()
    return _latest


def current() -> Call | None:
    """The innermost call under way."""
    return _under_way[-1] if _under_way else None


def latest() -> Call | None:
    """The innermost call under way, else the one that ended last."""
    return current() or _latest


def current_batch() -> Candidates:
    """The batches that this rank may be at work on now."""
    call = current()
    return batch_of(()) if call is None else call.batch


# ------------------------------------------------------------------------ marks on the graph

_MARK = "instep.call"


def mark(outputs: object, call: Call) -> None:
    """Remember on the autograd graph itself that these outputs come from `call`."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn)[_MARK] = call


def calls_below(
    roots: Iterable[Tensor], parameters: WeakTensorKeyDictionary
) -> tuple[list[Call], bool]:
    """Which calls these tensors were computed from, and whether through any of `parameters`.

    Walks the graph from the roots down to marked outputs: in a training step a handful of nodes.
    """
    found: dict[Call, None] = {}
    touched = False
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        notes = _metadata(node)
        if _MARK in notes:
            found[notes[_MARK]] = None
            touched = True
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and variable in parameters:
            touched = True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return list(found), touched


def _metadata(node: Any) -> dict[str, Any]:
    notes: dict[str, Any] = node.metadata  # torch's stub calls this property a method
    return notes
