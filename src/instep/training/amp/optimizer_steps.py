"""What happens to an optimizer: its steps wait for gradients that are whole and unscaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from instep.training.amp.casting import no_cast
from instep.training.amp.errors import PrecisionError
from instep.training.amp.levels import HALVES, Options
from instep.training.amp.loss_scaler import unscale
from instep.training.amp.master_weights import Master

Tell = Callable[[str], None]

_NOTE = "_instep_steps"


def steps_of(optimizer: object) -> Steps:
    """What is known about an optimizer. Raises PrecisionError where nothing is."""
    if not prepared(optimizer):
        raise PrecisionError.not_prepared()
    steps: Steps = getattr(optimizer, _NOTE)
    return steps


def prepared(optimizer: object) -> bool:
    """Whether an optimizer's precision is set."""
    return hasattr(optimizer, _NOTE)


class Steps:
    """An optimizer's `step`, `zero_grad` and `add_param_group`, from now on.

    The methods are replaced on the object itself: its class stays what it was, and a learning-rate
    schedule made before or after sees every step, a skipped one too. Anything with these
    methods, `param_groups` and `state` will do.
    """

    def __init__(self, optimizer: Any, options: Options, tell: Tell) -> None:
        self.masters: list[Master] = []
        self._scale: float | None = None  # what the gradients are multiplied by now
        self._optimizer = optimizer
        self._options = options
        self._tell = tell
        self._skip: str | None = None
        if options.master_weights:
            for group in optimizer.param_groups:
                group["params"] = [self._stepped(p) for p in group["params"]]
        if optimizer.state and options.cast_model_type is not None:
            # Of an earlier life: in the dtype of what is stepped now.
            optimizer.load_state_dict(optimizer.state_dict())
        self._originals = {name: getattr(optimizer, name) for name in _OURS}
        for name, original in self._originals.items():
            setattr(optimizer, name, MethodType(_marked_like(original, _OURS[name]), optimizer))
        setattr(optimizer, _NOTE, self)

    @property
    def device(self) -> torch.device:
        """Where its parameters are (the first of them)."""
        first: Tensor = next(p for g in self._optimizer.param_groups for p in g["params"])
        return first.device

    # ------------------------------------------------------------------ around a backward

    def begin(self, scale: float) -> None:
        """A backward of a loss times `scale` comes next.

        What is in `.grad` is multiplied too, so that it is one sum all the while: of several
        losses, of several batches, over the ranks.
        """
        scaled = list(self._plain())
        if self._scale is None:
            for master in self.masters:
                master.begin(scale)
        else:
            scaled += [master.parameter for master in self.masters]
        if (factor := scale / (self._scale or 1.0)) != 1.0:
            for parameter in scaled:
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(factor)
        self._scale = scale

    def end(self) -> list[Tensor]:
        """Let the gradients be as if nobody had scaled; returns the flags of `unscale`."""
        assert self._scale is not None
        taken = [(master, master.take()) for master in self.masters]
        fresh = [(master, grad) for master, grad in taken if grad is not None]
        grads = [p.grad for p in self._plain() if p.grad is not None]
        found = unscale([*grads, *(grad for _, grad in fresh)], self._scale)
        for master, grad in fresh:
            master.keep(grad)
        self._scale = None
        return found

    def skip_next(self, why: str) -> None:
        """Let the next step pass over.

        Its gradients become zeros, so that another loss's are judged by themselves.
        """
        self._skip = why
        for grad in (p.grad for group in self._optimizer.param_groups for p in group["params"]):
            if grad is not None:
                grad.detach().zero_()

    def _plain(self) -> Iterator[Tensor]:
        """The parameters that have no copy."""
        copies = {id(master.copy) for master in self.masters}
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in copies)

    # --------------------------------------------------------------------- the three methods

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, or nothing where gradients have overflowed."""
        closure = kwargs.get("closure", args[0] if args else None)
        if closure is not None and self._options.scales:
            raise PrecisionError.closure()
        if self._scale is not None:
            raise PrecisionError.still_scaled()
        if self._skip is not None:
            self._tell(self._skip)
            self._skip = None
            self._optimizer._opt_called = True  # else a schedule warns that it came first
            result = None
        else:
            for master in self.masters:
                master.follow()
            with no_cast():
                result = self._originals["step"](*args, **kwargs)
            for master in self.masters:
                master.lead()
        for master in self.masters:
            master.copy.grad = None
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The gradients of the model too."""
        for master in self.masters:
            master.parameter.grad = None
        self._scale = None
        self._originals["zero_grad"](*args, **kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """A group whose half-precision parameters get copies."""
        if self._options.master_weights:
            given = group["params"]
            given = [given] if isinstance(given, Tensor) else given
            if not isinstance(given, set):  # the optimizer says what is wrong with a set
                group["params"] = [self._stepped(p) for p in given]
        self._originals["add_param_group"](group)

    def _stepped(self, parameter: Tensor) -> Tensor:
        """What the optimizer steps for a parameter."""
        if parameter.dtype not in HALVES or not parameter.requires_grad:
            return parameter
        master = Master(parameter)
        self.masters.append(master)
        state = self._optimizer.state
        if parameter in state:
            state[master.copy] = state.pop(parameter)
        return master.copy


def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return steps_of(optimizer).step(*args, **kwargs)


def _zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
    steps_of(optimizer).zero_grad(*args, **kwargs)


def _add_param_group(optimizer: Any, group: dict[str, Any]) -> None:
    steps_of(optimizer).add_param_group(group)


_OURS = {"step": _step, "zero_grad": _zero_grad, "add_param_group": _add_param_group}


def _marked_like(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` with the marks that others left on the original: a schedule that was made before
    counts on finding its mark."""

    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(optimizer, *args, **kwargs)

    vars(method).update(getattr(original, "__dict__", {}))
    return method
