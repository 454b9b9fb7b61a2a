"""The gradients of a call's whole forward, and what their computation changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from instep.training.autograd_graph import next_nodes, walk
from instep.unedited.errors import ShardedCallError
from instep.unedited.objects.script_code import is_of_script
from instep.unedited.sharded_call.compare.rounding import (
    Products,
    VectorJacobianProducts,
    gradient_errors,
)
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.plan.bound_call import AttributePlace, BoundCall


class StatePair(NamedTuple):
    """The state before and after a forward or backward."""

    before: Snapshot
    after: Snapshot


class WholeGradients:
    """The gradients of a forward's outputs, computed once, and of other outputs to compare with.

    Args:
        call: the call.
        outputs: of its whole forward.
        start: the number of that forward's first autograd node.
        parameters: those that the module keeps as plain tensors.
    """

    def __init__(
        self, call: BoundCall, outputs: Sequence[Any], start: int, parameters: Sequence[Tensor]
    ) -> None:
        self._call = call
        self._products = VectorJacobianProducts.of(call, outputs, parameters)
        self._own: Products = []
        self._functions = _backward_functions(outputs, start)
        """The script's functions that its backward calls, and what they hold, with paths."""
        self.last_backward: StatePair | None = None
        """The state before and after the last backward, where it calls such functions."""
        self.own_backward: StatePair | None = None
        """The same of its own, where that changes it."""

    @property
    def are_any(self) -> bool:
        """Whether there are gradients to compute."""
        return bool(self._products.cotangents)

    def compute(self, outputs: Sequence[Any]) -> None:
        """Compute those of the forward's outputs."""
        with self._noting_state():
            self._own = self._products.grads(outputs)

    def check_backward(self, kept: Sequence[AttributePlace]) -> None:
        """Look at what that has changed. Raises ShardedCallError where it rules out sharding.

        `kept`: the attributes in which the forward keeps tensors.
        """
        if self.last_backward is None:
            return
        before, after = self.last_backward
        if why := before.find_change(after, kept):
            raise ShardedCallError(why.text.replace("forward", "backward", 1))
        if before.has_changed(after):
            self.own_backward = self.last_backward
        else:  # hold nothing of the graph
            self._functions, self.last_backward = [], None

    def errors_of(self, outputs: Sequence[Any]) -> list[float]:
        """How far the gradients of these outputs are off."""
        with self._noting_state():
            found = self._products.grads(outputs)
        return gradient_errors(found, self._own)

    def are_finite(self) -> bool:
        """Whether they are, as far as they were computed: others tell nothing."""
        grads = chain(*self._own)
        return all(grad is None or bool(grad.isfinite().all()) for grad in grads)

    def sum_errors(self, outputs: Sequence[Any]) -> list[float]:
        """See `VectorJacobianProducts.sum_errors`; of the forward's own outputs, computed anew."""
        with self._noting_state():
            return self._products.sum_errors(outputs, self._own)

    @contextmanager
    def _noting_state(self) -> Iterator[None]:
        """What the script's functions change in a backward inside is noted and set back."""
        if not self._functions:
            yield
            return
        before = Snapshot(self._call, self._functions)
        before.note_values(self._call)
        try:
            yield
        finally:
            self.last_backward = StatePair(before, Snapshot(self._call, self._functions))
            before.note_changes()
            before.restore()


def _backward_functions(outputs: Sequence[Any], start: int) -> list[tuple[str, Any]]:
    """The script's subclasses of torch.autograd.Function whose backward these outputs call, as far
    as a forward is concerned whose first node has the number `start`, and what their contexts have
    in attributes; with paths."""
    found: dict[int, tuple[str, Any]] = {}

    def visit(node: Any) -> list[Any]:
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and is_of_script(function):
            name = function.__name__
            found[id(function)] = name, function
            found.update(
                (id(value), (f"variable {attribute} of {name}", value))
                for attribute, value in vars(node).items()
            )
        return next_nodes(node) if node._sequence_nr() >= start else []

    walk((out for out in outputs if isinstance(out, Tensor)), visit)
    return list(found.values())
