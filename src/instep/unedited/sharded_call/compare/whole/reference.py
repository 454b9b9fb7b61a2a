"""The whole forward of a call, with which sharded ones are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instep.training.autograd_graph import next_nodes, used_by_others, walk
from instep.training.pytree import Structure, find_tensors, flatten, leaves_of, unflatten
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.compare.whole.whole_forward import WholeForward
from instep.unedited.sharded_call.compare.whole.whole_gradients import WholeGradients
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
from instep.unedited.sharded_call.plan.module_state.stored_parameters import plain_parameters
from instep.unedited.sharded_call.plan.sharding_plan import Draw
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason
from instep.unedited.sharded_call.run.argument_writes import Written, run_whole
from instep.unedited.sharded_call.run.random_numbers import WholeDraw, noted_draws
from instep.unedited.sharded_call.run.region import find_leaves
from instep.unedited.sharded_call.run.tensor_subclasses import is_subclass


class Reference:
    """The whole forward of a call: its outputs and their graph, their gradients, and what it did
    beside returning them."""

    def __init__(self, call: BoundCall) -> None:
        self._plain_parameters = plain_parameters(call.module)
        self.forward = WholeForward(call)
        self.call = self.forward.call
        result = self.forward.result()
        self.outputs, self.structure = flatten(result)
        self.count_kept = len(leaves_of(result.kept)) if isinstance(result, Written) else 0
        """How many of its outputs, the last ones, are in attributes that keep tensors."""
        is_plain = not (isinstance(result, Written) or any(map(is_subclass, self.outputs)))
        self._can_release = call.is_on_accelerator and is_plain
        self._leaves: list[Tensor] | None = None
        """Of its graph, once that is released."""
        self.used_by_others = used_by_others(self.outputs)
        """Which of its outputs others were computed from."""
        self.drawn: dict[Draw, WholeDraw] = {}
        """What it draws, where that was asked for."""
        self.gradients: WholeGradients | None = None
        """None until `compute_gradients`."""

    @property
    def before(self) -> Snapshot:
        """The state before the forward."""
        return self.forward.before

    @property
    def after(self) -> Snapshot:
        """The state that it left."""
        return self.forward.after

    @property
    def returns_scalar(self) -> bool:
        """Whether it returns a loss, say, or another mean or sum."""
        return any(isinstance(out, Tensor) and not out.dim() for out in self.outputs)

    def check_supported(self, *, joins_attributes: bool) -> WholeReason | None:
        """Say what rules out sharding before it is tried; None if nothing does.

        `joins_attributes`: whether tensors may be kept in these.
        """
        if self.forward.records:
            return self.forward.records
        if self.forward.kept and (is_compiled(self.call.parts) or not joins_attributes):
            return WholeReason(f"its forward keeps tensors in {self.forward.kept[0][1]}")
        opaque = [out for out in self.outputs if not isinstance(out, Tensor) and find_tensors(out)]
        if opaque:
            return WholeReason(
                f"it returns a {type(opaque[0]).__name__}, into which instep does not look (return "
                "a tuple, a dict or a dataclass, or register that class with "
                "torch.utils._pytree.register_pytree_node)"
            )
        if not any(isinstance(out, Tensor) for out in self.outputs):
            return WholeReason("it returns no tensor")
        return self.forward.find_change()

    def has_structure(self, structure: Structure) -> bool:
        """Whether what it returns has this structure, in which some lists may be one leaf."""
        if structure == self.structure:
            return True
        return flatten(unflatten(self.outputs, self.structure), structure)[1] == structure

    def uses_older(self) -> bool:
        """Whether it was computed from something that is no argument and was computed before."""
        return find_leaves(self.outputs, self.forward.start, self.call.tensors) is None

    def reads_computed(self) -> bool:
        """Whether it has read what the script has computed before and has not passed to it: through
        that, a backward would go on into the script's own graph. What autocast has cast does not
        count."""
        own = (*self.call.tensors, *nn.Module.parameters(self.call.module), *self._plain_parameters)
        return find_leaves(self.outputs, self.forward.start, own, ends_at=_is_cast) is None

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
        start, parameters = self.forward.start, self._plain_parameters
        gradients = self.gradients = WholeGradients(self.call, self.outputs, start, parameters)
        releases = self._can_release and gradients.are_any and not self.uses_older()
        if releases:
            self._leaves = self.leaves()
        try:
            gradients.compute(self.outputs)
        finally:
            if releases:
                self._drop_graph()
        gradients.check_backward(self.forward.kept)

    def gradient_errors(self, outputs: Sequence[Any]) -> list[float]:
        """How far the gradients of these outputs are off; empty if its own were not computed."""
        return [] if self.gradients is None else self.gradients.errors_of(outputs)

    def release(self) -> None:
        """On an accelerator, let go of the forward's graph before another one is made."""
        if self._can_release and not self.is_released:
            self._leaves = self.leaves()
            self._drop_graph()

    def _drop_graph(self) -> None:
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in self.outputs]
        self.forward.value = None

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
            return self.forward.value
        self.before.restore()
        with observed(is_silent=True):
            return self.call.run_whole()

    def note_draws(self) -> None:
        """Find what it draws, by one more forward."""
        self.before.restore()
        self.drawn = {}
        with observed(is_silent=True), noted_draws(self.drawn):
            run_whole(self.call)


def _is_cast(node: Any) -> bool:
    """Whether autocast has cast a parameter here: it keeps that for the calls that follow."""
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return is_cast and node.name() == "ToCopyBackward0" and hasattr(next_nodes(node)[0], "variable")
