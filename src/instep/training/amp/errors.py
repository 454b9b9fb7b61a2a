"""What can be wrong about mixed precision. The sentence lives in the class."""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import TrainingError


class PrecisionError(TrainingError, RuntimeError):
    """Mixed precision was asked for in a way that cannot work."""

    @classmethod
    def unknown_level(cls, level: object, known: Iterable[str]) -> PrecisionError:
        """Not one of the four."""
        return cls(
            f"unknown level {level!r}; known are {', '.join(known)} "
            "(the letter O and a digit, not two digits)."
        )

    @classmethod
    def contradiction(cls, level: str, option: str, value: object, why: str) -> PrecisionError:
        """An option that the level leaves no meaning for."""
        return cls(f"{option}={value!r} contradicts level {level}: {why}")

    @classmethod
    def option(cls, option: str, value: object, allowed: str) -> PrecisionError:
        """A value that an option does not have."""
        return cls(f"{option} is {allowed}, not {value!r}.")

    @classmethod
    def wrapped(cls, kind: str) -> PrecisionError:
        """The model is wrapped or replicated already."""
        return cls(
            f"the model is already {kind}, whose gradients were planned for the parameters as they "
            "were. Set the precision first, then replicate or wrap the model."
        )

    @classmethod
    def twice(cls, what: str) -> PrecisionError:
        """A model or an optimizer comes a second time."""
        return cls(
            f"the precision of this {what} is set already; a second time would cast and scale "
            "twice. Set it once, for all models and optimizers together."
        )

    @classmethod
    def not_float32(cls, name: str, dtype: object) -> PrecisionError:
        """A model of another dtype."""
        return cls(
            f"{name} is {dtype}, but a level starts from a model in torch.float32. Leave out "
            "half(), bfloat16() or double(); the level casts what it must."
        )

    @classmethod
    def closure(cls) -> PrecisionError:
        """step(closure): the closure's own backward would not be scaled."""
        return cls(
            "optimizer.step(closure) under loss scaling: the closure's gradients would be scaled "
            "by nobody, or never scaled back. Compute the gradients first and call step() without "
            "a closure; LBFGS needs level O0."
        )

    @classmethod
    def still_scaled(cls) -> PrecisionError:
        """A step with gradients that have not been scaled back."""
        return cls(
            "optimizer.step() while the gradients are still scaled: the latest scale_loss had "
            "delay_unscale=True. Leave that out in the last backward before a step."
        )

    @classmethod
    def not_prepared(cls) -> PrecisionError:
        """A loss is scaled for an optimizer that nobody has told about it."""
        return cls(
            "this optimizer's precision was never set; pass it to the same call as its model "
            "before scaling a loss for it."
        )

    @classmethod
    def no_such_loss(cls, loss_id: object, losses: int) -> PrecisionError:
        """More losses than were announced."""
        return cls(
            f"loss {loss_id!r} does not exist: {losses} announced, counted from 0. "
            "Say how many there are when the precision is set (num_losses)."
        )

    @classmethod
    def not_initialized(cls) -> PrecisionError:
        """A loss is scaled, or scales are loaded, before anything."""
        return cls("amp.initialize(model, optimizer, opt_level=...) must come before this.")

    @classmethod
    def unknown_keys(cls, keys: Iterable[str]) -> PrecisionError:
        """A state that is not amp's."""
        return cls(
            f"this state holds {', '.join(keys)}, which no loss scale is called. "
            "Load what amp.state_dict() returned."
        )
