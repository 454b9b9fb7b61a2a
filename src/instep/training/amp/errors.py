"""Errors of mixed precision."""

from __future__ import annotations

from instep.errors import TrainingError


class PrecisionError(TrainingError, RuntimeError):
    """Mixed precision was requested in a way that cannot work."""

    @classmethod
    def option(cls, option: str, value: object, allowed: str) -> PrecisionError:
        """A value that an option does not take."""
        return cls(f"{option} is {allowed}, not {value!r}.")

    @classmethod
    def wrapped(cls, state: str) -> PrecisionError:
        """A model that is wrapped or replicated already."""
        return cls(
            f"the model is already {state}, whose gradients were planned for the parameters as "
            "they were. Set the precision first, then replicate or wrap the model."
        )

    @classmethod
    def twice(cls, name: str) -> PrecisionError:
        """A model or an optimizer comes a second time."""
        return cls(
            f"the precision of this {name} is set already; a second time would cast and scale "
            "twice. Set it once, for all models and optimizers together."
        )

    @classmethod
    def not_float32(cls, name: str, dtype: object) -> PrecisionError:
        """A model of another dtype."""
        return cls(
            f"{name} is {dtype}, but a level starts from a model in torch.float32. Leave out "
            "half(), bfloat16() or double(); the level casts what it must."
        )
