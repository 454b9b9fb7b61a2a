"""Gradients that are not finite: on which rank, of which parameter and samples they began.

Each backward looks at two numbers: the loss, and the sum of a small gradient that it reaches last,
through which most of what is not finite before it has gone. Only if one of them is not finite does
the rank look at all of its own gradients, before they are summed. It is reported when an optimizer
steps with them: a scaler of losses, or the script, may skip the step.
"""

from __future__ import annotations

import cmath
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed.flight_record.script_line import location, script_frame, warn_at_script_line
from instep.process import settings
from instep.training.autograd_graph import Root
from instep.training.blocks import Block
from instep.training.drift.comparison import DriftCheck
from instep.training.drift.optimizers import before_each_step, follow_optimizers, parameters_of
from instep.training.errors import NonFiniteGradError


class OwnGrads(Protocol):
    """A bucket, before its sum over the ranks."""

    def own_grads(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The parameters of which this rank has a gradient, and these."""

    def last_small_grad(self) -> Tensor | None:
        """A small one of the gradients that backward has reached last."""


class FiniteCheck:
    """Looks at the gradients of one backward on this rank.

    Args:
        roots: on which backward is called.
        rows: this rank's rows of the batch, if they are known.
        rank: this rank.
    """

    def __init__(self, roots: Iterable[Root], rows: Block | None, rank: int) -> None:
        mode = str(settings.NAN)
        self._is_off = mode == "off"
        self._waits_for_device = mode == "error"
        self._rows, self._rank = rows, rank
        self._found: list[Tensor] = []
        self._is_suspicious = not self._is_off and any(map(self._is_bad_loss, roots))

    def inspect(
        self, buckets: Sequence[OwnGrads], *, are_last: bool, accumulated: bool = False
    ) -> None:
        """Look at these buckets, which are about to be summed.

        Args:
            are_last: whether the last one holds what backward reaches last.
            accumulated: whether gradients of earlier backwards are in them, too.
        """
        if self._is_off or not buckets:
            return
        if not self._is_suspicious and are_last:
            grad = buckets[-1].last_small_grad()
            if grad is not None and self._can_read(grad):
                self._is_suspicious = not cmath.isfinite(grad.sum().item())
        if not self._is_suspicious:
            return
        found = [
            parameter
            for bucket in buckets
            for parameter, grad in bucket.own_grads()
            if self._can_read(grad) and not grad.isfinite().all()
        ]
        if found and accumulated:
            self._rows = None
        self._found += found

    def end(self, checks: Iterable[DriftCheck | None]) -> None:
        """The backward has ended; `checks`: of the models that it has reached."""
        _report.drop_stale()
        if self._found and _report.pending is None:
            models = [check for check in checks if check is not None]
            _report.pending = _Finding(self._found, self._rows, self._rank, models)
            follow_optimizers()
            before_each_step(_before_step)

    def _is_bad_loss(self, root: Root) -> bool:
        if type(root) is not Tensor or root.numel() != 1 or not self._can_read(root):
            return False
        return not cmath.isfinite(root.item())

    def _can_read(self, tensor: Tensor) -> bool:
        """Whether to look at it waits for no device, or the user wants that."""
        return tensor.element_size() > 1 and (tensor.device.type == "cpu" or self._waits_for_device)


class _Finding:
    """Gradients of one backward that were not finite."""

    def __init__(
        self, found: Sequence[Tensor], rows: Block | None, rank: int, models: Sequence[DriftCheck]
    ) -> None:
        broken = [parameter for parameter in found if not parameter.isfinite().all()]
        self.is_of_rank = not broken or rank == 0
        """Whether this rank shows it: parameters that are not finite are so on all ranks."""
        parameter = (broken or found)[0]
        names = (model.name_of(parameter) for model in models)
        name = next((name for name in names if name), f"a tensor of shape {[*parameter.shape]}")
        self.error = NonFiniteGradError(
            rank,
            name,
            others=len(found) - 1,
            step=max((model.step for model in models), default=0),
            samples=None if rows is None else (rows.start, rows.stop - 1, rows.total),
            began_here=not broken,
        )
        self._parameter = weakref.ref(parameter)

    def is_current(self) -> bool:
        """Whether the gradient is still there, and still not finite."""
        parameter = self._parameter()
        grad = None if parameter is None else parameter.grad
        return grad is not None and not grad.isfinite().all()

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps with the gradient."""
        parameter = self._parameter()
        return any(each is parameter for each in parameters_of(optimizer))


def _warn(text: str) -> None:
    warn_at_script_line(f"{text} Training goes on. [INS702]")


@dataclass
class _FindingReport:
    """Shows the first finding whose gradients an optimizer steps with."""

    show: Callable[[str], None] = _warn
    pending: _Finding | None = None
    has_shown: bool = False

    def clear(self) -> None:
        """Forget what was found, so that it is shown again."""
        self.pending, self.has_shown = None, False

    def drop_stale(self) -> None:
        """Forget a finding whose gradient is not there any more."""
        if self.pending is not None and not self.pending.is_current():
            self.pending = None

    def before_step(self, optimizer: Optimizer) -> None:
        """Show what is kept, if the optimizer steps with it. Raises NonFiniteGradError."""
        finding = self.pending
        if finding is None or not finding.is_for(optimizer):
            return
        self.pending = None
        if _skips_step(optimizer) or not finding.is_current():
            return
        if str(settings.NAN) == "error":
            raise finding.error
        if finding.is_of_rank and not self.has_shown:
            self.has_shown = True
            self.show(str(finding.error))


_report = _FindingReport()


def show_with(function: Callable[[str], None] | None) -> None:
    """Let `function` show a line in place of a warning; None: a warning."""
    _report.show = _warn if function is None else lambda text: function(_format_line(text))


def _format_line(text: str) -> str:
    place = location(script_frame(sys._getframe(1)))
    return f"instep: {text} Training goes on at {place}. [INS702]"


def _before_step(optimizer: Optimizer) -> None:
    _report.before_step(optimizer)


def report_step(optimizer: Optimizer, step: int, show: Callable[[str], None]) -> bool:
    """Look at all gradients with which this optimizer steps, which are the same on all ranks.

    Args:
        step: how often it has stepped, with this time.
        show: shows the line about the first that are not finite.

    Returns whether any were found, now or before. Raises NonFiniteGradError if the user wants that.
    """
    if _report.has_shown or _skips_step(optimizer):
        return _report.has_shown
    parameters = parameters_of(optimizer)
    found = [p for p in parameters if p.grad is not None and not p.grad.isfinite().all()]
    if not found:
        return False
    broken = [parameter for parameter in found if not parameter.isfinite().all()]
    error = NonFiniteGradError(
        None,
        _name_in_modules((broken or found[::-1])[0]),
        others=len(found) - 1,
        step=step,
        samples=None,
        began_here=not broken,
    )
    if str(settings.NAN) == "error":
        raise error
    _report.has_shown = True
    show(_format_line(str(error)))
    return True


def _skips_step(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer of torch's GradScaler decides by itself to skip the step."""
    return getattr(optimizer, "found_inf", None) is not None


def _name_in_modules(parameter: Tensor) -> str:
    """The longest name that any module of the script has for it, or its shape."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    named = (item for module in modules for item in module.named_parameters())
    names = [name for name, each in named if each is parameter]
    return max(names, key=len, default=f"a tensor of shape {[*parameter.shape]}")


def reset() -> None:
    """Forget what was found, so that it is shown again."""
    _report.clear()


def zero_non_finite(tensor: Tensor) -> Tensor:
    """A gradient with zeros in place of what is no number."""
    if tensor.is_sparse:
        whole = tensor.coalesce()
        values = zero_non_finite(whole.values())
        return torch.sparse_coo_tensor(whole.indices(), values, whole.shape, is_coalesced=True)
    return torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))
