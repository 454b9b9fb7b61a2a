"""Errors of `instep.replicate` and `instep.shard`, and of the backwards of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instep.errors import LaunchError, TrainingError
from instep.process.exit_status import format_ranks


class BitwiseError(LaunchError):
    """`--bitwise` does not go with the number of ranks or with the script, or the script asks for
    it and was started without."""


class ReplicatedTwiceError(TrainingError):
    """A model, or a part of it, is already a replica."""


class ShardedTwiceError(TrainingError):
    """A loader, a batch or an optimizer is already divided."""

    def __init__(
        self,
        what: str = "this loader or batch is already this rank's share; sharding it again would "
        "drop samples",
    ) -> None:
        super().__init__(f"{what}. Call instep.shard once.")


class CannotShardError(TrainingError, TypeError):
    """This value has no rows, or this optimizer no steps, that could be divided."""


class MixedSumsError(TrainingError):
    """Ranks have added up the gradients of different parameters."""

    @classmethod
    def of_models(cls) -> MixedSumsError:
        """In a bucket."""
        return cls(
            "this rank summed the gradients of one model or batch while another rank summed those "
            "of another. Let backward use the same models and batches on every rank, in the same "
            "order."
        )

    @classmethod
    def of_hooked(cls, shape: tuple[int, ...]) -> MixedSumsError:
        """In a gradient that is summed at once, because a hook must see it."""
        return cls(
            f"a parameter of shape {shape} with a gradient hook was used on this rank, while "
            "another rank used another one. Parameters with hooks must be used on every rank in "
            "each step, or on none."
        )


class DriftError(TrainingError):
    """The ranks' parameters, buffers or hyper-parameters, or their steps, have become different."""

    @classmethod
    def of_option(
        cls, name: str, groups: Mapping[str, Sequence[int]], since: tuple[int, int]
    ) -> DriftError:
        """Of a hyper-parameter; `groups`: the ranks that have each value."""
        shown = _format_groups(groups)
        return cls(
            f"{name} is not the same on all ranks ({shown}), {_since(since)}. Set it to one value, "
            "whatever the rank and its data are."
        )

    @classmethod
    def of_batches(cls, groups: Mapping[int, Sequence[int]], since: tuple[int, int]) -> DriftError:
        """Of the batches that were requested since the first step; `groups`: by their number."""
        shown = _format_groups(groups)
        return cls(
            "the ranks have requested different numbers of batches from their loaders since the "
            f"first step ({shown}), {_since(since)}: gradients of different batches are summed. A "
            "step was left out on some ranks only; leave it out on all of them, or on none."
        )

    @classmethod
    def of_left_out(cls, groups: Mapping[int, Sequence[int]]) -> DriftError:
        """Of the batches without a backward; `groups`: the ranks that have each number of them."""
        shown = _format_groups(groups)
        return cls(
            "the ranks would sum gradients of different batches: of those that they took from "
            f"loaders, they have left out different numbers ({shown}). Leave a batch out on all "
            "ranks, or on none: decide by a value that is equal on them, such as "
            'instep.all_reduce(loss.detach(), "mean"). If a rank left it out because it has caught '
            "an exception, let the others know of that."
        )

    @classmethod
    def of_backwards(cls, groups: Mapping[int, Sequence[int]]) -> DriftError:
        """Of the batches that were requested, and had a backward; `groups`: by their number."""
        shown = _format_groups(groups)
        return cls(
            f"the ranks would sum gradients of different batches (the number of the batch of this "
            f"backward on {shown}): some of them have called backward more often than others for "
            "one batch. Call it equally often on every rank; one that has nothing to add can call "
            "it for a loss that is multiplied by zero."
        )

    @classmethod
    def of_epochs(cls, groups: Mapping[int, Sequence[int]]) -> DriftError:
        """Of the epochs of a loader; `groups`: the ranks in each of them."""
        shown = _format_groups({epoch + 1: ranks for epoch, ranks in groups.items()})
        return cls(
            f"the ranks are in different epochs of a loader ({shown}): each has another order of "
            "samples. Some ranks only have begun to iterate over it, as by next(iter(loader)), or "
            "have left it early; do that on every rank, or on none."
        )

    @classmethod
    def of_tensor(
        cls,
        name: str,
        groups: Mapping[object, Sequence[int]],
        since: tuple[int, int],
        difference: float,
        others: int,
        *,
        is_rounding: bool = False,
    ) -> DriftError:
        """Of a parameter or buffer.

        Args:
            name: what differs.
            groups: the ranks that have the same one.
            since: the steps between which it came to differ.
            difference: the largest one.
            others: how many more tensors differ.
            is_rounding: whether the difference is no more than one of rounding.
        """
        *odd, most = sorted(groups.values(), key=lambda ranks: (len(ranks), 0 in ranks))
        ranks = [rank for ranks in odd for rank in ranks]
        verb = "differs" if len(ranks) == 1 else "differ"
        more = f" {others} more tensors differ." if others > 1 else " One more differs." * others
        cause = "Something"
        if is_rounding:
            cause = (
                "That is no more than rounding. Processors of different kinds round differently, "
                "and so does torch.linalg.lstsq in each process: then the numbers are right. "
                "Otherwise something"
            )
        return cls(
            f"{name} of {format_ranks(ranks)} {verb} from that of {format_ranks(most)} "
            f"{_since(since)}, by up to {difference:.3g}.{more} {cause} has changed it on some "
            "ranks only; change it on every rank alike. INSTEP_DRIFT_STEPS=1 names the step, 0 "
            "compares nothing."
        )


def _format_groups(groups: Mapping[Any, Sequence[int]]) -> str:
    """The ranks that have each value, and the value."""
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in groups.items())


def _since(steps: tuple[int, int]) -> str:
    return f"since a step between {steps[0]} and {steps[1]}"


class NonFiniteGradError(TrainingError):
    """An optimizer steps with a gradient that is infinite or not a number.

    Args:
        rank: the rank whose part of the gradient is not finite; None if no rank has a part of it.
        name: of the first such parameter in the order of backward.
        others: how many more there are.
        step: how many backwards have summed gradients of the model.
        samples: the first and the last sample of this rank, and how many the batch has.
        began_here: False if the parameter itself is not finite.
    """

    def __init__(
        self,
        rank: int | None,
        name: str,
        *,
        others: int,
        step: int,
        samples: tuple[int, int, int] | None,
        began_here: bool,
    ) -> None:
        if began_here:
            where = "" if rank is None else f"on rank {rank} "
            more = f" and those of {others} more parameters are" if others else " is"
            part = ""
            if samples is not None:
                part = ", from samples {} to {} of the batch of {}".format(*samples)
            text = (
                f"{where}the gradient of {name}{more} not finite{part}, in step {step}; the "
                "optimizer steps with it."
            )
        else:
            text = (
                f"the parameter {name} itself is not finite, in step {step}; an earlier step has "
                "made it so, or it was so from the start."
            )
        super().__init__(f"{text} INSTEP_NAN=error stops the job there.")


class UnknownBatchError(TrainingError):
    """A forward may belong to batches of different sizes, and it is not known to which."""


class EmptyBlockError(TrainingError):
    """Nothing is left of this rank's samples of a batch."""


class OtherDataError(TrainingError):
    """The data of a loader are not those with which its position was saved."""

    @classmethod
    def of_batches(cls, saved: int, seen: int, unit: str = "samples") -> OtherDataError:
        """Batches that do not end where the position is, counted in `unit`."""
        return cls(
            f"the checkpoint was saved after {saved} {unit} of an epoch, and no batch of this "
            f"loader ends there: {seen} {unit} were passed over. Use the same batch size and "
            "sampler, or resume from a checkpoint at the end of an epoch."
        )


class CapturedStepError(TrainingError):
    """A CUDA graph captures the forward of a replica in training."""


class MixedBatchesError(TrainingError):
    """One backward through two batches, or calls, of which this rank has different weights.

    Args:
        weights: this rank's weight of each call.
        are_stated: whether all or none of them are stated by `instep.weight`.
    """

    def __init__(self, weights: Sequence[float], *, are_stated: bool) -> None:
        shares = " and ".join(f"{weight:.6g}" for weight in sorted(weights))
        if are_stated:
            super().__init__(
                "one backward goes through two batches of which this rank holds different "
                f"fractions ({shares}); one weight cannot be right for both. Call backward() once "
                "for each batch's loss: the gradients add up to the same."
            )
            return
        super().__init__(
            "one backward goes through several calls of replicated models, and instep.weight was "
            f"called for some of them only: this rank's weights of them ({shares}) differ. It "
            "states the denominator of the last call's loss. Call it after each of these calls, if "
            "one loss divides all of them by the same number; else call backward() once for each "
            "loss: the gradients add up to the same."
        )
