"""`apex.amp.handle`: scaled losses, and the object that `amp.init` returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from instep.compat.apex.amp._amp_state import _amp_state
from instep.training.amp.casting import active_dtype, no_cast, stop_casting
from instep.training.amp.errors import PrecisionError
from instep.training.amp.mixed import Mixed


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield `loss.float()` times its scale; at the end scale the gradients back, or skip the step.

    Arguments are Apex's (`model` is ignored); see `instep.precision.Mixed.scale`. Collective if the
    scale is dynamic. Raises PrecisionError before `initialize`.
    """
    if _amp_state.is_disabled:
        yield loss
        return
    with initialized().scale(
        loss,
        optimizers,
        loss_id,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    ) as scaled:
        yield scaled


def initialized() -> Mixed:
    """What scales the losses. Raises PrecisionError before `initialize`."""
    if _amp_state.mixed is None:
        raise PrecisionError(
            "amp.initialize(model, optimizer, opt_level=...) must come before this."
        )
    return _amp_state.mixed


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, functions compute in the dtype of their inputs (O1)."""
    with no_cast():
        yield


class AmpHandle:
    """The casts of torch's functions. It scales no losses, as in Apex from 0.1 on."""

    has_cache = False
    """Weights are cast at each use."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.cache: dict[Any, Any] = {}
        """Always empty."""

    def is_active(self) -> bool:
        """Whether torch's functions are cast at this point."""
        return active_dtype() is not None

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Raises PrecisionError."""
        raise _old_interface("handle.scale_loss(loss, optimizer)")

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Raises PrecisionError."""
        raise _old_interface("handle.wrap_optimizer(optimizer)")

    def _disable_casts(self) -> AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        """Does nothing: there is no cache."""

    def _deactivate(self) -> None:
        stop_casting()


class NoOpHandle(AmpHandle):
    """The handle of `init(enabled=False)`: nothing is cast or scaled."""

    def is_active(self) -> bool:
        """False."""
        return False

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the loss itself."""
        yield loss

    def _deactivate(self) -> None:
        """Does nothing."""


def _old_interface(call: str) -> PrecisionError:
    return PrecisionError(
        f"{call} is the interface before Apex 0.1. Call model, optimizer = "
        "amp.initialize(model, optimizer) once, and amp.scale_loss(loss, optimizer) for each loss."
    )
