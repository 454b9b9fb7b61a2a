"""Gradients of which no rank has its own part: those of calls that are computed whole, and of one
process.

Before an optimizer steps, the sum of its first small gradient is read, which backward has most
often reached last: what is not finite has gone into it. torch is imported only where a script
imports it, and the rest only where something is found.
"""

from __future__ import annotations

import cmath
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from instep.process import settings
from instep.process.import_hooks import after_import
from instep.process.process_value import ProcessValue

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SMALL = 2**12
"""The elements of a gradient that is read at each step."""

_is_summed = ProcessValue(False)
"""Whether the latest backward has summed gradients over the ranks, which a FiniteCheck looks at."""


def note_backward(*, is_summed: bool) -> None:
    """A backward runs; `is_summed`: it sums gradients over the ranks."""
    _is_summed.value = is_summed


class StepCheck:
    """Looks at the gradients with which optimizers step, until `end`.

    Args:
        show: shows the line about the first that are not finite.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._numbers: weakref.WeakKeyDictionary[Optimizer, count[int]]
        """Of the steps that each optimizer makes."""
        self._numbers = weakref.WeakKeyDictionary()
        self._waits_for_device = str(settings.NAN) == "error"
        self._is_over = False
        self._at_end = ExitStack()
        if str(settings.NAN) != "off":
            self._at_end.callback(after_import("torch", self._install))

    def end(self) -> None:
        """Look at none from now on."""
        self._at_end.close()

    def _install(self, torch: Any) -> None:
        self._tensor = torch.Tensor
        self._is_compiling = torch.compiler.is_compiling
        self._is_capturing = torch.cuda.is_current_stream_capturing
        optimizers = import_module("torch.optim.optimizer")
        hook = optimizers.register_optimizer_step_pre_hook(self._before_step)
        self._at_end.callback(hook.remove)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_over or self._is_compiling():
            return
        numbers = self._numbers.get(optimizer)
        if numbers is None:
            numbers = self._numbers[optimizer] = count(1)
        step = next(numbers)
        if _is_summed.value or cmath.isfinite(self._first_sum(optimizer)):
            return
        non_finite = import_module("instep.training.drift.non_finite")
        self._is_over = non_finite.report_step(optimizer, step, self._show)

    def _first_sum(self, optimizer: Optimizer) -> complex:
        """The sum of the first small gradient that can be read; 0 if there is none."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or type(grad) is not self._tensor or grad.numel() > _SMALL:
                    continue
                if grad.is_cpu or (self._waits_for_device and not self._is_capturing()):
                    return grad.sum().item() if grad.element_size() > 1 else 0.0
        return 0.0
