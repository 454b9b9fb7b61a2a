"""The whole forward of a call, with which sharded ones are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.training.autograd_graph import next_nodes, used_by_others, walk
from instep.training.pytree import (
    Structure,
    ValueSnapshot,
    find_tensors,
    flatten,
    leaves_of,
    unflatten,
)
from instep.unedited.errors import ShardedCallError
from instep.unedited.objects.script_code import is_of_script
from instep.unedited.sharded_call.compare.rounding import (
    Products,
    VectorJacobianProducts,
    gradient_errors,
)
from instep.unedited.sharded_call.compare.side_effects import (
    observed,
    recorded_samples,
    watched_outside_calls,
)
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.plan.bound_call import AttributePlace, BoundCall
from instep.unedited.sharded_call.plan.module_properties import is_compiled, library_hooks
from instep.unedited.sharded_call.plan.sharding_plan import Draw
from instep.unedited.sharded_call.plan.stored_parameters import plain_parameters
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason
from instep.unedited.sharded_call.run.argument_writes import (
    ArgumentWatch,
    TensorAttributes,
    Written,
    has_only_tensors,
    run_whole,
)
from instep.unedited.sharded_call.run.random_numbers import WholeDraw, noted_draws
from instep.unedited.sharded_call.run.region import find_leaves
from instep.unedited.sharded_call.run.tensor_subclasses import is_subclass
from instep.unedited.sharded_call.shards.batch_sums import Place, noted_lengths
from instep.unedited.sharded_call.shards.shard_threads import next_sequence_number


class StatePair(NamedTuple):
    """The state before and after a forward or backward."""

    before: Snapshot
    after: Snapshot


class _WatchedForward:
    """The whole forward, and what it does beside returning something."""

    def __init__(self, call: BoundCall) -> None:
        self._call = call
        self.attributes = TensorAttributes(call)
        self.arguments = ArgumentWatch(call, call.args, call.kwargs)
        self._requires_gradients = _require_gradients(call)
        self._grads = _grads(nn.Module.parameters(call.module))
        self._hooks = {w: ValueSnapshot(kept) for w, kept in library_hooks(call.module).items()}
        self.sum_lengths: dict[Place, set[int]] = {}

    def run(self) -> Any:
        """Run it; returns what the script gets."""
        compiles = is_compiled(self._call.parts)
        noted = nullcontext() if compiles else noted_lengths(self.sum_lengths)
        outside = nullcontext() if compiles else watched_outside_calls(self._call.parts)
        recorded = recorded_samples()
        with observed() as effects, noted, outside as calls:
            value = self._call.run_whole()
        self._has_recorded = recorded_samples() != recorded
        self.effect = None if calls is None else effects.first
        """What it did that cannot be undone."""
        self.outside_change = None if calls is None else calls.find_change()
        return value

    def find_records(self) -> WholeReason | None:
        """What it has left for later that no call may leave twice."""
        if self._has_recorded:
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

    def find_changed_arguments(self) -> WholeReason | None:
        """Whether it changes them otherwise than by items of dicts."""
        asks = self._requires_gradients != _require_gradients(self._call)
        if asks or self.arguments.has_other_changes():
            return WholeReason("its forward changes its arguments")
        return None


class Reference:
    """The whole forward of a call: its outputs, their gradients, and the state that it left."""

    def __init__(self, call: BoundCall) -> None:
        self.before = Snapshot(call)
        self.before.note_values(call)
        forward = _WatchedForward(call)
        self._plain_parameters = plain_parameters(call.module)
        self._start = next_sequence_number()
        self._value = forward.run()
        self.sum_lengths = forward.sum_lengths
        """Of the tensors of which it computes sums and means, by functions that are no losses."""
        self.after = Snapshot(call)
        self.before.note_changes()
        found = forward.attributes.find()
        self.kept = tuple(dict.fromkeys((*call.kept, *found)))
        """The attributes that it has set to tensors, and those that it is known to set."""
        self.call = call.keeping(self.kept)
        """The call, with these."""
        self.begins_to_keep = not all(map(has_only_tensors, map(self._value_before, found)))
        """Whether some of these had no tensors before."""
        new = [place for place in found if place not in call.kept]
        result = forward.arguments.result(self._value, new)
        self.outputs, self.structure = flatten(result)
        self.count_kept = len(leaves_of(result.kept)) if isinstance(result, Written) else 0
        """How many of its outputs, the last ones, are in these attributes."""
        is_plain = not (isinstance(result, Written) or any(map(is_subclass, self.outputs)))
        self._can_release = call.is_on_accelerator and is_plain
        self._leaves: list[Tensor] | None = None
        """Of its graph, once that is released."""
        self.used_by_others = used_by_others(self.outputs)
        """Which of its outputs others were computed from."""
        self._records = forward.find_records() or self._find_kept_again()
        self._effect = forward.find_keeping_hook() or forward.effect
        self._other_change = forward.outside_change or forward.find_changed_arguments()
        self.changes_attributes = self.before.has_other_values(self.after)
        self.changes_state = self.changes_attributes or self.before.has_other_buffers(self.after)
        """Whether it changed plain values that it keeps, or buffers that are no running
        statistics."""
        self.is_random = self.before.is_random(self.after)
        """Whether it drew random numbers."""
        self.draws_outside_torch = self.before.draws_outside_torch(self.after)
        """Whether it drew from numpy's or Python's generators."""
        self.drawn: dict[Draw, WholeDraw] = {}
        """What it draws, where that was asked for."""
        self._products: VectorJacobianProducts | None = None
        self._gradients: Products = []
        self._functions: list[tuple[str, Any]] = []
        """The script's functions that its backward calls, and what they hold, with paths."""
        self.last_backward: StatePair | None = None
        """The state before and after the last backward, where it calls such functions."""
        self.own_backward: StatePair | None = None
        """The same of its own, where that changes it."""

    def _value_before(self, place: AttributePlace) -> Any:
        """What an attribute had before the forward, which may have changed a list first."""
        nodes = self.before.graph.nodes
        value = nodes[id(self.call.parts[place[0]])].contents.get(place[1])
        return nodes[id(value)].contents if id(value) in nodes else value

    def _find_kept_again(self) -> WholeReason | None:
        """Say where it keeps tensors of earlier calls beside new ones; None if nowhere."""
        for part, name in self.kept:
            leaves = leaves_of(self.call.parts[part].__dict__.get(name))
            known = [id(leaf) in self.before.graph.tensors for leaf in leaves]
            if any(known) and not all(known):
                return WholeReason(f"its forward adds tensors to those that it keeps in {name}")
        return None

    @property
    def returns_scalar(self) -> bool:
        """Whether it returns a loss, say, or another mean or sum."""
        return any(isinstance(out, Tensor) and not out.dim() for out in self.outputs)

    def check_supported(self, *, joins_attributes: bool) -> WholeReason | None:
        """Say what rules out sharding before it is tried; None if nothing does.

        `joins_attributes`: whether tensors may be kept in these.
        """
        if self._records:
            return self._records
        if self.kept and (is_compiled(self.call.parts) or not joins_attributes):
            return WholeReason(f"its forward keeps tensors in {self.kept[0][1]}")
        opaque = [out for out in self.outputs if not isinstance(out, Tensor) and find_tensors(out)]
        if opaque:
            return WholeReason(
                f"it returns a {type(opaque[0]).__name__}, into which instep does not look (return "
                "a tuple, a dict or a dataclass, or register that class with "
                "torch.utils._pytree.register_pytree_node)"
            )
        if not any(isinstance(out, Tensor) for out in self.outputs):
            return WholeReason("it returns no tensor")
        change = self._effect or self.before.find_change(self.after, self.kept)
        return change or self._other_change

    def has_structure(self, structure: Structure) -> bool:
        """Whether what it returns has this structure, in which some lists may be one leaf."""
        if structure == self.structure:
            return True
        return flatten(unflatten(self.outputs, self.structure), structure)[1] == structure

    def uses_older(self) -> bool:
        """Whether it was computed from something that is no argument and was computed before."""
        return find_leaves(self.outputs, self._start, self.call.tensors) is None

    def reads_computed(self) -> bool:
        """Whether it has read what the script has computed before and has not passed to it: through
        that, a backward would go on into the script's own graph. What autocast has cast does not
        count."""
        own = (*self.call.tensors, *nn.Module.parameters(self.call.module), *self._plain_parameters)
        return find_leaves(self.outputs, self._start, own, ends_at=_is_cast) is None

    def uses_itself(self) -> bool:
        """Whether a backward of it would go on from an argument, through the script's own graph, to
        a parameter or another argument, of which the gradients are compared."""
        computed = [x for x in self.call.tensors if x.grad_fn is not None]
        targets = (*computed, *self._plain_parameters, *nn.Module.parameters(self.call.module))
        nodes = {x.grad_fn for x in targets if x.grad_fn is not None}
        leaves = {id(x) for x in (*targets, *self.call.tensors) if x.grad_fn is None}
        found = False

        def visit(node: Any) -> list[Any]:
            nonlocal found
            following = [] if found else [each for each in next_nodes(node) if each is not None]
            found = found or any(
                each in nodes or id(getattr(each, "variable", None)) in leaves for each in following
            )
            return following

        walk(computed, visit)
        return found

    def compute_gradients(self) -> None:
        """Compute its gradients now, while what autograd has saved is as it was.

        On an accelerator nothing refers to its graph any more after that: a script may fill the
        memory of its device with one forward, beside which a sharded one would find no room.
        Autograd must not free it, for the script may have parts of it: the way from a parameter or
        another argument to an argument, or a weight that a cache of the script keeps.
        Raises RuntimeError where the forward has freed it, ShardedCallError where the backward
        changes what rules out sharding.
        """
        self._products = VectorJacobianProducts.of(self.call, self.outputs, self._plain_parameters)
        self._functions = _backward_functions(self.outputs, self._start)
        releases = bool(self._can_release and self._products.cotangents) and not self.uses_older()
        if releases:
            self._leaves = self.leaves()
        try:
            with self._noting_state():
                self._gradients = self._products.grads(self.outputs)
        finally:
            if releases:
                self._drop_graph()
        if self.last_backward is None:
            return
        before, after = self.last_backward
        if why := before.find_change(after, self.kept):
            raise ShardedCallError(why.text.replace("forward", "backward", 1))
        if before.has_changed(after):
            self.own_backward = self.last_backward
        else:  # hold nothing of the graph
            self._functions, self.last_backward = [], None

    def release(self) -> None:
        """On an accelerator, let go of the forward's graph before another one is made."""
        if self._can_release and not self.is_released:
            self._leaves = self.leaves()
            self._drop_graph()

    def _drop_graph(self) -> None:
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in self.outputs]
        self._value = None

    @contextmanager
    def _noting_state(self) -> Iterator[None]:
        """What the script's functions change in a backward inside is noted and set back."""
        if not self._functions:
            yield
            return
        before = Snapshot(self.call, self._functions)
        before.note_values(self.call)
        try:
            yield
        finally:
            self.last_backward = StatePair(before, Snapshot(self.call, self._functions))
            before.note_changes()
            before.restore()

    def gradient_errors(self, outputs: Sequence[Any]) -> list[float]:
        """How far the gradients of these outputs are off; empty if its own were not computed."""
        if self._products is None:
            return []
        with self._noting_state():
            found = self._products.grads(outputs)
        return gradient_errors(found, self._gradients)

    def has_finite_gradients(self) -> bool:
        """Whether they are, as far as they were computed: others tell nothing."""
        grads = chain(*self._gradients)
        return all(grad is None or bool(grad.isfinite().all()) for grad in grads)

    def sum_errors(self, outputs: Sequence[Any]) -> list[float]:
        """Of its own outputs, computed anew: see `VectorJacobianProducts.sum_errors`."""
        assert self._products is not None
        with self._noting_state():
            return self._products.sum_errors(outputs, self._gradients)

    @property
    def is_released(self) -> bool:
        """Whether its graph is gone, and the whole forward has to run again for its value."""
        return self._leaves is not None

    def leaves(self) -> list[Tensor]:
        """The leaves of its graph."""
        return find_leaves(self.outputs, 0) or [] if self._leaves is None else self._leaves

    def value(self) -> Any:
        """What the call returns to the script where it is computed whole."""
        if not self.is_released:
            return self._value
        self.before.restore()
        with observed(is_silent=True):
            return self.call.run_whole()

    def note_draws(self) -> None:
        """Find what it draws, by one more forward."""
        self.before.restore()
        self.drawn = {}
        with observed(is_silent=True), noted_draws(self.drawn):
            run_whole(self.call)


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


def _is_cast(node: Any) -> bool:
    """Whether autocast has cast a parameter here: it keeps that for the calls that follow."""
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return is_cast and node.name() == "ToCopyBackward0" and hasattr(next_nodes(node)[0], "variable")


def _require_gradients(call: BoundCall) -> list[bool]:
    return [tensor.requires_grad for tensor in call.tensors]


def _grads(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, tuple[int, int] | None]:
    """The identity and version of `.grad` of each of these parameters that is a leaf."""
    grads = {parameter: parameter.grad for parameter in parameters if parameter.is_leaf}
    return {p: None if grad is None else (id(grad), grad._version) for p, grad in grads.items()}
