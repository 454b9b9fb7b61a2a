"""Errors of `instep.replicate` and `instep.shard`, and of the backwards of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.errors import TrainingError


class ReplicatedTwiceError(TrainingError):
    """A model, or a part of it, is already a replica."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is already replicated; its gradients would be summed twice. "
            "Call instep.replicate once, on the outermost module."
        )


class ShardedTwiceError(TrainingError):
    """A loader or a batch is already divided."""

    def __init__(self) -> None:
        super().__init__(
            "this loader or batch is already this rank's share; sharding it again would drop "
            "samples. Call instep.shard once."
        )


class CannotShardError(TrainingError, TypeError):
    """This value has no rows that could be divided."""


class MixedSumsError(TrainingError):
    """Ranks have added up the gradients of different parameters."""

    @classmethod
    def of_models(cls) -> MixedSumsError:
        """In a bucket."""
        return cls(
            "this rank summed the gradients of one model while another rank summed those of "
            "another model. Let backward use the same models on every rank, in the same order."
        )

    @classmethod
    def of_hooked(cls, shape: tuple[int, ...]) -> MixedSumsError:
        """In a gradient that is summed at once, because a hook must see it."""
        return cls(
            f"a parameter of shape {shape} with a gradient hook was used on this rank, while "
            "another rank used another one. Parameters with hooks must be used on every rank in "
            "each step, or on none."
        )


class UnknownBatchError(TrainingError):
    """A forward may belong to batches of different sizes, and it is not known to which."""

    def __init__(self, rows: Sequence[int], batches: Sequence[tuple[int, int]]) -> None:
        seen = ", ".join(map(str, rows)) or "no"
        listed = ", ".join(f"one of {total} samples ({count} here)" for total, count in batches)
        super().__init__(
            f"a forward's inputs have {seen} rows on this rank, and they may belong to different "
            f"batches: {listed}. Its gradient must be weighted by the batch's share, so pass the "
            "model the tensors that the sharded loader yields or views of them; or divide the "
            "other tensors by instep.shard; or, if another object loads ahead of the model, "
            "shard that object: instep.shard(prefetcher)."
        )


class MixedBatchesError(TrainingError):
    """One backward through two batches of which this rank holds different fractions."""

    def __init__(self, weights: Iterable[float]) -> None:
        shares = " and ".join(f"{weight:.6g}" for weight in sorted(weights))
        super().__init__(
            f"one backward goes through two batches of which this rank holds different fractions "
            f"({shares}); one weight cannot be right for both. Call backward() once for each "
            "batch's loss: the gradients add up to the same."
        )
