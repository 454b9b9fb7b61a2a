"""How far a sharded call may be from the whole one: what is known of this call's own rounding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from instep.training.pytree import leaves_of
from instep.unedited.sharded_call.compare.rounding import (
    FLIPPED_GRADIENT,
    MAX_ERROR,
    MAX_GRADIENT_ERROR,
    MAX_PROVEN_ERROR,
    PERTURBATIONS,
    SUM_FACTOR,
    allowed_error,
    gradient_tolerance,
    max_sum_error,
    output_tolerance,
    perturbed,
    relative_error,
    tolerance,
)
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.snapshot import (
    BufferKey,
    Snapshot,
    buffer_errors,
    buffer_states,
)
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.compare.whole.whole_gradients import StatePair
from instep.unedited.sharded_call.run.argument_writes import run_whole


class Noise:
    """How far a call is from itself when its parameters are one rounding error away.

    Units that flip by rounding make it differ from one perturbation to the next (by 8 times, in a
    U-Net over a ResNet), so the largest of several counts.
    """

    def __init__(self, reference: Reference) -> None:
        self.outputs = [0.0] * len(reference.outputs)
        self.buffers: dict[BufferKey, float] = {}
        self.gradients: list[float] = []
        for seed in range(PERTURBATIONS):
            reference.before.restore()
            with perturbed(reference.call.module, seed):
                self._add(reference)

    def _add(self, reference: Reference) -> None:
        call = reference.call
        outputs = leaves_of(run_whole(call))
        errors = [
            relative_error(again, out) if isinstance(out, Tensor) else 0.0
            for again, out in zip(outputs, reference.outputs, strict=True)
        ]
        self.outputs = list(map(max, self.outputs, errors))
        buffers = buffer_states([*call.module.modules()])
        for key, error in buffer_errors(buffers, reference.after.buffers, call.kept).items():
            self.buffers[key] = max(self.buffers.get(key, 0.0), error.to_spread)
        grads = reference.gradient_errors(outputs)
        self.gradients = list(map(max, self.gradients or grads, grads))


class Tolerances:
    """Compares what a sharded call gives with the whole one, up to rounding.

    What rounding does to this call is measured only once a difference depends on it.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._noise: Noise | None = None
        self.needs_noise = False
        """Whether a sharded call was so near that the noise may be what separates them."""
        self._sum_errors: list[float] | None = None
        """See `VectorJacobianProducts.sum_errors`; None: not measured; empty: not known."""
        self.needs_sums = False
        """Whether it has not been measured and may be what separates gradients."""
        self.flips = False
        """Whether units of the module are known to flip by rounding."""
        self.may_flip = False
        """Whether gradients differ by more than rounding explains, and by no more than units that
        flip would."""
        self.is_proven = False
        """Whether the call is the same in a higher precision. Then rounding alone sets them apart,
        which batch normalisation over few numbers enlarges without a limit."""

    @property
    def have_noise(self) -> bool:
        """Whether it is known what rounding does to this call."""
        return self._noise is not None

    def measure_noise(self) -> None:
        """Find how much of a difference rounding can explain."""
        with observed(is_silent=True):
            self._noise, self.needs_noise = Noise(self._reference), False

    def measure_sums(self) -> None:
        """Find how much of a difference of gradients the rounding of sums can explain."""
        self._reference.before.restore()
        self._sum_errors, self.needs_sums = [], False
        gradients = self._reference.gradients
        assert gradients is not None
        with observed(is_silent=True), suppress(Exception):  # of a backward that runs only once
            self._sum_errors = gradients.sum_errors(leaves_of(run_whole(self._reference.call)))

    def matches_output(self, k: int, joined: Tensor) -> bool:
        """Whether these rows are those of its `k`-th output."""
        out = self._reference.outputs[k]
        if self.is_proven:
            return relative_error(joined, out) <= MAX_PROVEN_ERROR
        noise = self._noise.outputs[k] if self._noise else 0.0
        return self._is_close(relative_error(joined, out), output_tolerance(out), noise, MAX_ERROR)

    def find_difference(self, local: Snapshot, whole: StatePair) -> str | None:
        """Say which state a sharded forward or backward has left otherwise than a whole one; None
        if none."""
        before, after = whole
        devices = {state.buffer.device.type for state in after.buffers.values()}
        limit = max((tolerance(torch.float32, device) for device in devices), default=0.0)
        noises = self._noise.buffers if self._noise else {}
        far = [
            key
            for key, error in local.buffer_errors(after).items()
            if error.relative > limit
            and not (self.is_proven and error.to_spread <= MAX_PROVEN_ERROR)
            and not self._is_close(error.to_spread, 0.0, noises.get(key, 0.0), MAX_ERROR)
        ]
        return local.find_difference(after, before, far, limit or tolerance(torch.float32))

    def matches_gradients(self, outputs: list[Any]) -> bool:
        """Whether these outputs give the same gradients, if they were computed."""
        errors = self._reference.gradient_errors(outputs)
        if self.is_proven:
            return max(errors, default=0.0) <= MAX_PROVEN_ERROR
        noises = self._noise.gradients if self._noise else [0.0] * len(errors)
        # For another rounding another unit flips: it moves other gradients, by as much at most.
        largest = min(max(noises, default=0.0), MAX_GRADIENT_ERROR)
        limit = max(gradient_tolerance(outputs, flips=self.flips), largest)
        of_sums = self._allowed_by_sums(outputs, len(errors))
        close = [
            error <= allowed or self._is_close(error, limit, noise, MAX_GRADIENT_ERROR)
            for error, noise, allowed in zip(errors, noises, of_sums, strict=True)
        ]
        may_be_sums = max(errors, default=0.0) <= max_sum_error(outputs) and not all(close)
        self.needs_sums = self._sum_errors is None and may_be_sums
        is_near = max(errors, default=0.0) <= FLIPPED_GRADIENT
        self.may_flip = self._noise is not None and is_near and not all(close)
        return all(close)

    def _allowed_by_sums(self, outputs: Sequence[Any], count: int) -> list[float]:
        """How far each gradient may be off by the rounding of sums, as far as that is known."""
        most = max_sum_error(outputs)
        if not self._sum_errors or not all(error <= most for error in self._sum_errors):
            return [0.0] * count
        return [min(SUM_FACTOR * error, most) for error in self._sum_errors]

    def _is_close(self, error: float, limit: float, noise: float, max_error: float) -> bool:
        if error <= allowed_error(limit, noise, max_error):
            return True
        self.needs_noise |= self._noise is None and error <= max_error
        return False
