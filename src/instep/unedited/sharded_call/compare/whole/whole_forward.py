"""The whole forward of a call, and what it does beside returning something."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch import nn

from instep.training.pytree import ValueSnapshot, leaves_of
from instep.unedited.sharded_call.compare.side_effects import (
    observed,
    recorded_samples,
    watched_outside_calls,
)
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.plan.bound_call import AttributePlace, BoundCall
from instep.unedited.sharded_call.plan.control_flow import floats_read
from instep.unedited.sharded_call.plan.module_state.module_properties import (
    is_compiled,
    library_hooks,
)
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason
from instep.unedited.sharded_call.run.argument_writes import (
    ArgumentWatch,
    TensorAttributes,
    attribute_value,
    has_only_tensors,
)
from instep.unedited.sharded_call.shards.reductions import Place, noted_lengths
from instep.unedited.sharded_call.shards.shard_threads import next_sequence_number


class WholeForward:
    """The whole forward of a call, which has run, and what it did beside returning something."""

    def __init__(self, call: BoundCall) -> None:
        self.before = Snapshot(call)
        self.before.note_values(call)
        attributes, arguments = TensorAttributes(call), ArgumentWatch(call, call.args, call.kwargs)
        lasting = _LastingChanges(call)
        required = _require_gradients(call)
        self.sum_lengths: dict[Place, set[int]] = {}
        """Of the tensors of which it computes sums and means, by functions that are no losses."""
        self.reduction_lengths: dict[Place, set[int]] = {}
        """Of those of which it computes other reductions: the largest value, a norm."""
        compiles = is_compiled(call.parts)
        noted = noted_lengths(self.sum_lengths, self.reduction_lengths)
        outside = nullcontext() if compiles else watched_outside_calls(call.parts)
        self.start = next_sequence_number()
        """The number of its first autograd node."""
        with observed() as effects, nullcontext() if compiles else noted, outside as calls:
            self.value = call.run_whole()
            """What the script gets."""
        self.files = tuple(effects.files_read)
        """Those that it has read, and libraries have not installed."""
        self.floats = floats_read()
        """What it has read from tensors as floats."""
        outside_change = None if calls is None else calls.find_change()
        self.after = Snapshot(call)
        self.before.note_changes()
        found = attributes.find()
        self.kept = tuple(dict.fromkeys((*call.kept, *found)))
        """The attributes that it has set to tensors, and those that it is known to set."""
        self.call = call.keeping(self.kept)
        """The call, with these."""
        self.begins_to_keep = not all(map(has_only_tensors, map(self._value_before, found)))
        """Whether some of these had no tensors before."""
        self._arguments, self._new = arguments, [p for p in found if p not in call.kept]
        self.records = lasting.find_records() or self._find_kept_again()
        """What it has left for later that no call may leave twice."""
        self._effect = lasting.find_keeping_hook() or (None if calls is None else effects.first)
        """What it did that cannot be undone."""
        self._other_change = outside_change
        if required != _require_gradients(call) or arguments.has_other_changes():
            self._other_change = outside_change or WholeReason("its forward changes its arguments")
        self.changes_attributes = self.before.has_other_values(self.after)
        self.changes_state = self.changes_attributes or self.before.has_other_buffers(self.after)
        """Whether it changed plain values that it keeps, or buffers that are no running
        statistics."""
        self.is_random = self.before.is_random(self.after)
        """Whether it drew random numbers."""
        self.draws_outside_torch = self.before.draws_outside_torch(self.after)
        """Whether it drew from numpy's or Python's generators."""

    def result(self) -> Any:
        """What it returned, and what it left for the script beside that (see `Written`)."""
        return self._arguments.result(self.value, self._new)

    def find_change(self) -> WholeReason | None:
        """Say what it has changed that rules out sharding; None if there is nothing."""
        change = self._effect or self.before.find_change(self.after, self.kept)
        return change or self._other_change

    def _value_before(self, place: AttributePlace) -> Any:
        """What an attribute had before the forward, which may have changed a list first."""
        nodes = self.before.graph.nodes
        value = nodes[id(self.call.parts[place[0]])].contents.get(place[1])
        return nodes[id(value)].contents if id(value) in nodes else value

    def _find_kept_again(self) -> WholeReason | None:
        """Say where it keeps tensors of earlier calls beside new ones; None if nowhere."""
        for part, name in self.kept:
            leaves = leaves_of(attribute_value(self.call.parts[part], name))
            known = [id(leaf) in self.before.graph.tensors for leaf in leaves]
            if any(known) and not all(known):
                return WholeReason(f"its forward adds tensors to those that it keeps in {name}")
        return None


class _LastingChanges:
    """What a forward may leave behind beside its state, as it was before."""

    def __init__(self, call: BoundCall) -> None:
        self._grads = _grads(nn.Module.parameters(call.module))
        self._hooks = {w: ValueSnapshot(kept) for w, kept in library_hooks(call.module).items()}
        self._recorded = recorded_samples()

    def find_records(self) -> WholeReason | None:
        """What it has left for later that no call may leave twice."""
        if recorded_samples() != self._recorded:
            return WholeReason("Pyro records what its forward samples")
        if self._grads != _grads(self._grads):
            return WholeReason("its forward changes gradients of its parameters (by backward, say)")
        return None

    def find_keeping_hook(self) -> WholeReason | None:
        """A library's hook that keeps something of what it sees."""
        for where, kept in self._hooks.items():
            if not kept.is_current():
                return WholeReason(f"a hook of {where} keeps something of what it sees")
        return None


def _require_gradients(call: BoundCall) -> list[bool]:
    return [tensor.requires_grad for tensor in call.tensors]


def _grads(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, tuple[int, int] | None]:
    """The identity and version of `.grad` of each of these parameters that is a leaf."""
    grads = {parameter: parameter.grad for parameter in parameters if parameter.is_leaf}
    return {p: None if grad is None else (id(grad), grad._version) for p, grad in grads.items()}
