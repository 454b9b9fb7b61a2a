"""The whole forward of a call, with which sharded ones are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from instep.training.pytree import ValueSnapshot, find_tensors, flatten, leaves_of
from instep.unedited.sharded_call.compare.rounding import (
    FLIPPED_GRADIENT,
    MAX_ERROR,
    MAX_GRADIENT_ERROR,
    PERTURBATIONS,
    SUM_FACTOR,
    Products,
    VectorJacobianProducts,
    allowed_error,
    gradient_errors,
    gradient_tolerance,
    max_sum_error,
    output_tolerance,
    perturbed,
    relative_error,
    tolerance,
)
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.snapshot import BufferKey, Snapshot
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.module_properties import is_compiled, library_hooks
from instep.unedited.sharded_call.plan.sharding_plan import Draw, OutputPlan
from instep.unedited.sharded_call.plan.stored_parameters import StoredParameter
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason
from instep.unedited.sharded_call.run.argument_writes import ArgumentWatch, Written, run_whole
from instep.unedited.sharded_call.run.random_numbers import DrawShapes
from instep.unedited.sharded_call.run.region import find_leaves
from instep.unedited.sharded_call.run.tensor_subclasses import is_subclass
from instep.unedited.sharded_call.shards.batch_sums import RowSums, SumLengths
from instep.unedited.sharded_call.shards.shard_threads import next_sequence_number


class Noise:
    """How far a call is from itself when its parameters are one rounding error away.

    Units that flip by rounding make it differ from one perturbation to the next (by 8 times, in a
    U-Net over a ResNet), so the largest of several counts.
    """

    def __init__(self, call: BoundCall, reference: Reference) -> None:
        self.outputs = [0.0] * len(reference.outputs)
        self.buffers: dict[BufferKey, float] = {}
        self.gradients: list[float] = []
        for seed in range(PERTURBATIONS):
            reference.before.restore()
            with perturbed(call.module, seed):
                self._add(call, reference)

    def _add(self, call: BoundCall, reference: Reference) -> None:
        outputs = leaves_of(run_whole(call))
        errors = [
            relative_error(again, out) if isinstance(out, Tensor) else 0.0
            for again, out in zip(outputs, reference.outputs, strict=True)
        ]
        self.outputs = list(map(max, self.outputs, errors))
        after = Snapshot(call.module, call.leaves)
        for key, error in after.buffer_errors(reference.after).items():
            self.buffers[key] = max(self.buffers.get(key, 0.0), error.to_spread)
        if reference.vjp is not None:
            found = reference.vjp.grads(outputs)
            grads = gradient_errors(found, reference.gradients)
            self.gradients = list(map(max, self.gradients or grads, grads))


class Reference:
    """The whole forward of a call: its outputs, their gradients, and the state that it left."""

    def __init__(self, call: BoundCall) -> None:
        self.before = Snapshot(call.module, call.leaves)
        self.before.note_values(call.module, call.leaves)
        watch = ArgumentWatch(call.args, call.kwargs)
        requires_gradients = _require_gradients(call)
        hooks = {where: ValueSnapshot(kept) for where, kept in library_hooks(call.module).items()}
        self._start = next_sequence_number()
        compiles = is_compiled(call.parts)
        sums = SumLengths()
        with observed() as effects, nullcontext() if compiles else sums.noted():
            self.value = call.run_whole()
        self.side_effect = None if compiles else effects.first
        """What it does that cannot be undone."""
        self.after = Snapshot(call.module, call.leaves)
        result = watch.result(self.value)
        self.outputs, self.structure = flatten(result)
        is_plain = not (isinstance(result, Written) or any(map(is_subclass, self.outputs)))
        self._can_release = call.is_on_accelerator and is_plain
        self._leaves: list[Tensor] | None = None
        """Of its graph, once that is released."""
        asks = requires_gradients != _require_gradients(call)
        self.changes_arguments = asks or watch.has_other_changes()
        self.changes_attributes = self.before.has_other_values(self.after)
        self.keeping_hooks = [where for where, kept in hooks.items() if not kept.is_current()]
        """Where libraries have hooks that keep something of what they see."""
        self.sum_lengths = sums.found
        """Of the tensors of which it computes sums and means, by functions that are no losses."""
        self.sums: RowSums | None = None
        """Which of these are to be those of the whole batch in a sharded call; None: none is."""
        self.is_random = self.before.is_random(self.after)
        """Whether it drew random numbers."""
        self.vjp: VectorJacobianProducts | None = None
        self.gradients: Products = []
        self.noise: Noise | None = None
        self.drawn: Mapping[Draw, Sequence[int]] = {}
        """The shapes of what it draws, where they were asked for."""
        self.in_doubt = False
        """Whether a sharded call was so near that rounding may be what separates them."""
        self.sum_errors: list[float] | None = None
        """How far each gradient is from a sum of two, once that is measured; empty: not known."""
        self.sums_in_doubt = False
        """Whether it has not been measured and may be what separates gradients."""
        self.may_flip = False
        """Whether gradients differ by more than rounding explains, and by no more than units that
        flip would."""
        self.flips = False
        """Whether they are known to flip."""
        self.has_foreign_leaf = False
        """Whether a sharded call used a tensor from outside that requires a gradient."""
        self.known_outputs: tuple[OutputPlan, ...] = ()
        """How they were joined in earlier calls."""
        self.stored: tuple[StoredParameter, ...] | None = None
        """The places beside its own tables where aliases stand in for its parameters; None until
        they are looked for."""

    @property
    def returns_scalar(self) -> bool:
        """Whether it returns a loss, say, or another mean or sum."""
        return any(isinstance(out, Tensor) and not out.dim() for out in self.outputs)

    def check_supported(self) -> WholeReason | None:
        """Say what rules out sharding before it is tried; None if nothing does."""
        opaque = [out for out in self.outputs if not isinstance(out, Tensor) and find_tensors(out)]
        if opaque:
            return WholeReason(
                f"it returns a {type(opaque[0]).__name__}, into which instep does not look (return "
                "a tuple, a dict or a dataclass, or register that class with "
                "torch.utils._pytree.register_pytree_node)"
            )
        if not any(isinstance(out, Tensor) for out in self.outputs):
            return WholeReason("it returns no tensor")
        if self.keeping_hooks:
            return WholeReason(f"a hook of {self.keeping_hooks[0]} keeps something of what it sees")
        if why := self.side_effect or self.before.find_change(self.after):
            return why
        return WholeReason("its forward changes its arguments") if self.changes_arguments else None

    def uses_older(self, call: BoundCall) -> bool:
        """Whether it was computed from something that is no argument and was computed before."""
        return find_leaves(self.outputs, self._start, call.leaves) is None

    def compute_gradients(self, call: BoundCall) -> None:
        """Compute its gradients now, while what autograd has saved is as it was.

        On an accelerator nothing refers to its graph any more after that: a script may fill the
        memory of its device with one forward, beside which a sharded one would find no room.
        Autograd must not free it, for the script may have parts of it: the way from a parameter or
        another argument to an argument, or a weight that torch.nn.utils.parametrize.cached keeps.
        """
        if self.vjp is not None:
            return
        self.vjp = VectorJacobianProducts.of(call, self.outputs)
        if not (self._can_release and self.vjp.cotangents) or self.uses_older(call):
            self.gradients = self.vjp.grads(self.outputs)
            return
        self._leaves = self.leaves()
        try:
            self.gradients = self.vjp.grads(self.outputs)
        finally:
            self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in self.outputs]
            self.value = None

    @property
    def is_released(self) -> bool:
        """Whether its graph is gone, and the whole forward has to run again for its value."""
        return self._leaves is not None

    def leaves(self) -> list[Tensor]:
        """The leaves of its graph."""
        return find_leaves(self.outputs, 0) or [] if self._leaves is None else self._leaves

    def value_of(self, call: BoundCall) -> Any:
        """What the call returns to the script where it is computed whole."""
        if not self.is_released:
            return self.value
        self.before.restore()
        with observed(is_silent=True):
            return call.run_whole()

    def note_draws(self, call: BoundCall) -> None:
        """Find the shapes of what it draws."""
        self.before.restore()
        with observed(is_silent=True), DrawShapes() as draws:
            run_whole(call)
        self.drawn = draws.shapes

    def measure_noise(self, call: BoundCall) -> None:
        """Find how much of a difference rounding can explain."""
        with observed(is_silent=True):
            self.noise, self.in_doubt = Noise(call, self), False

    def measure_sums(self, call: BoundCall) -> None:
        """Find how much of a difference of gradients the rounding of sums can explain."""
        assert self.vjp is not None
        self.before.restore()
        self.sum_errors, self.sums_in_doubt = [], False
        with observed(is_silent=True), suppress(Exception):  # of a backward that runs only once
            self.sum_errors = self.vjp.sum_errors(leaves_of(run_whole(call)), self.gradients)

    def matches_output(self, k: int, joined: Tensor) -> bool:
        """Whether these rows are those of its `k`-th output."""
        out = self.outputs[k]
        noise = self.noise.outputs[k] if self.noise else 0.0
        return self._is_close(relative_error(joined, out), output_tolerance(out), noise, MAX_ERROR)

    def find_difference(self, local: Snapshot) -> str | None:
        """Say which state a sharded forward has left otherwise; None if none."""
        devices = {buffer.device.type for buffer, _ in self.after.buffers.values()}
        limit = max((tolerance(torch.float32, device) for device in devices), default=0.0)
        noises = self.noise.buffers if self.noise else {}
        far = [
            key
            for key, error in local.buffer_errors(self.after).items()
            if error.relative > limit
            and not self._is_close(error.to_spread, 0.0, noises.get(key, 0.0), MAX_ERROR)
        ]
        return local.find_difference(
            self.after, self.before, far, limit or tolerance(torch.float32)
        )

    def matches_gradients(self, outputs: list[Any]) -> bool:
        """Whether these outputs give the same gradients, if they were computed."""
        if self.vjp is None:
            return True
        errors = gradient_errors(self.vjp.grads(outputs), self.gradients)
        noises = self.noise.gradients if self.noise else [0.0] * len(errors)
        # For another rounding another unit flips: it moves other gradients, by as much at most.
        largest = min(max(noises, default=0.0), MAX_GRADIENT_ERROR)
        limit = max(gradient_tolerance(outputs, flips=self.flips), largest)
        of_sums = self._allowed_by_sums(outputs, len(errors))
        close = [
            error <= allowed or self._is_close(error, limit, noise, MAX_GRADIENT_ERROR)
            for error, noise, allowed in zip(errors, noises, of_sums, strict=True)
        ]
        may_be_sums = max(errors, default=0.0) <= max_sum_error(outputs) and not all(close)
        self.sums_in_doubt = self.sum_errors is None and may_be_sums
        is_near = max(errors, default=0.0) <= FLIPPED_GRADIENT
        self.may_flip = self.noise is not None and is_near and not all(close)
        return all(close)

    def _allowed_by_sums(self, outputs: Sequence[Any], count: int) -> list[float]:
        """How far each gradient may be off by the rounding of sums, as far as that is known."""
        most = max_sum_error(outputs)
        if not self.sum_errors or not all(error <= most for error in self.sum_errors):
            return [0.0] * count
        return [min(SUM_FACTOR * error, most) for error in self.sum_errors]

    def _is_close(self, error: float, limit: float, noise: float, max_error: float) -> bool:
        if error <= allowed_error(limit, noise, max_error):
            return True
        self.in_doubt |= self.noise is None and error <= max_error
        return False


def _require_gradients(call: BoundCall) -> list[bool]:
    return [leaf.requires_grad for leaf in call.leaves if isinstance(leaf, Tensor)]
