"""Errors in the use of Horovod's interface.

InstepError
├── NotInitializedError      (ValueError) before init() or after shutdown()
├── UnsupportedFeatureError  (NotImplementedError, AttributeError) a part that instep does not have
├── WrongArgumentError       (ValueError) names, splits, groups, process sets
├── UnsupportedOpError       (ValueError, RuntimeError) a reduction that a collective cannot make
├── HostsUpdatedInterrupt    (RuntimeError) the hosts of an elastic job have changed
└── CallOrderError           (AssertionError) backward, zero_grad, step in an order that loses data

The built-in types are those that Horovod raises, so scripts that catch them still do.
"""

from __future__ import annotations

from collections.abc import Iterable

from instep.distributed.negotiation.errors import NegotiationError as HorovodInternalError
from instep.errors import InstepError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class NotInitializedError(InstepError, ValueError):
    """init() was not called, or shutdown() was."""

    def __init__(self) -> None:
        super().__init__("Horovod's interface is not initialized on this rank; call hvd.init().")


class UnsupportedFeatureError(InstepError, NotImplementedError, AttributeError):
    """A part of Horovod that instep does not have."""

    @classmethod
    def communicator(cls) -> UnsupportedFeatureError:
        """An argument is a communicator of mpi4py."""
        return cls(
            "MPI communicators are not supported. Give process sets as lists of ranks; init() "
            "takes no comm: the launcher decides which ranks there are."
        )

    @classmethod
    def some_ranks(cls, ranks: Iterable[int], size: int) -> UnsupportedFeatureError:
        """`comm` of `init` has other ranks than the job."""
        return cls(
            f"hvd.init(comm={list(ranks)}): the launcher decides which ranks there are, here "
            f"{size}. Leave out comm, and give hvd.init(process_sets=[hvd.ProcessSet(ranks)])."
        )


class WrongArgumentError(InstepError, ValueError):
    """An argument that has no meaning."""

    @classmethod
    def root(cls, root: int, members: Iterable[int]) -> WrongArgumentError:
        """`root_rank` is not in the process set."""
        ranks = ", ".join(map(str, members))
        return cls(f"root_rank {root} does not take part; the ranks are {ranks}.")

    @classmethod
    def ranks(cls, ranks: object) -> WrongArgumentError:
        """A process set has duplicate, unknown or no ranks."""
        return cls(f"a process set is a list of different ranks, not {ranks!r}.")

    @classmethod
    def groups(cls) -> WrongArgumentError:
        """`groups` of DistributedOptimizer is something else."""
        return cls(
            "groups is a number of groups from 1 up, or a list of lists of parameters in which "
            "each parameter occurs once."
        )


class UnsupportedOpError(InstepError, ValueError, RuntimeError):
    """A reduction that a collective does not make."""

    def __init__(self, collective: str, op: object, known: Iterable[str]) -> None:
        super().__init__(f"{collective} does not make {op}; it makes {', '.join(known)}.")


class CallOrderError(InstepError, AssertionError):
    """A training loop in an order that would lose gradients."""


class HostsUpdatedInterrupt(InstepError, RuntimeError):  # noqa: N818 - Horovod's name
    """Ranks can be added, or have to leave: `hvd.elastic.run` handles it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this elastic job have changed; hvd.elastic.run handles it.")
        self.skip_sync = skip_sync
        """Whether no rank is new, so that all have the same state."""
