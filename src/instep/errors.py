"""Every error that instep raises, as a tree. The sentence lives in the class.

InstepError
├── LaunchError                   how this job was started
│   ├── CommandLineError          what `instep` was asked to do
│   ├── StartError                a rank that the system would not start
│   ├── LaunchVariablesError      variables half set, contradictory or not numbers
│   ├── PortInUseError            the master's port belongs to somebody else
│   ├── LeftoverRendezvousError   a rendezvous file of another job
│   ├── RendezvousError           the ranks cannot meet as asked
│   ├── DeviceError               no accelerator for this rank, or one for two ranks
│   ├── MixedJobError             ranks of different scripts, arguments or versions
│   ├── BackendError              a backend that this host does not have
│   ├── RankFailedError           a rank that `instep.spawn` started failed
│   ├── CannotSendError           (TypeError) what `instep.spawn` cannot hand to a rank, or back
│   └── UneditedError             a script that cannot run unedited on several ranks
├── RunOnceError                  a run-once scope that cannot hand over its result
├── CollectiveError               talking
│   ├── UnknownOpError            (ValueError) a reduction that does not exist
│   ├── WrongDeviceError          a tensor where this job's ranks cannot talk
│   ├── UnsuitableTensorError     (TypeError) a tensor that this collective has no meaning for
│   ├── OverflowedError           (OverflowError) a sum of integers that its dtype cannot hold
│   ├── NotAMemberError           (ValueError) a rank talks in a group of others
│   ├── InsideScopeError          a collective inside of a run-once scope
│   ├── DisagreementError         the ranks mean different things
│   ├── NameInFlightError         (ValueError) a second collective of a name under way
│   ├── NegotiationError          (RuntimeError) a named collective that cannot take place
│   ├── SharedMemoryError         (RuntimeError) not enough of it for all ranks
│   └── BrokenGroupError          (RuntimeError) the ranks are out of step for good
│       ├── PeerDiedError         a rank's process ended
│       ├── PeerLeftError         a rank destroyed its process group
│       ├── PeerGaveUpError       a rank stopped with an error
│       ├── CollectiveTimeoutError   a rank did not come in time
│       └── ForkedChildError      a forked child is not a rank
├── VerificationError             what `instep verify` cannot judge
│   ├── ScriptFailedError         the script failed at some number of ranks
│   ├── ScriptLateError           it took far longer there than in one process
│   └── StepsError                it does no training step
└── TrainingError                 the script's use of replicate and shard
    ├── ReplicatedTwiceError
    ├── ShardedTwiceError
    ├── CannotShardError          (TypeError) a loader or batch that has no blocks
    ├── LoadingError              (RuntimeError) a rank could not load its rows of a batch
    ├── MixedSumsError            gradients of different parameters added up by different ranks
    ├── UnknownBatchError         nothing tells which batch a forward belongs to
    ├── MixedBatchesError         two batches of different weights in one backward
    └── PrecisionError            (RuntimeError) mixed precision; see instep.training.amp.errors

InstepWarning (UserWarning)       what instep cannot keep the same

What a caller may also catch as a built-in (ValueError, TypeError) says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar


def _unpickled(kind: type[InstepError], args: tuple[object, ...]) -> InstepError:
    """An error by its sentence: not every class's constructor takes that."""
    return kind.__new__(kind, *args)


class InstepError(Exception):
    """The root: catch it to catch whatever instep raises by itself. Every one pickles."""

    caused_by_another_rank: ClassVar[bool] = False
    """Whether another rank's failure, departure or other path led to it."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (type(self), self.args), self.__dict__


class InstepWarning(UserWarning):
    """What instep cannot keep the same, said once."""


class LaunchError(InstepError):
    """This job was started in a way that cannot work."""


class CommandLineError(LaunchError):
    """`instep` was asked for something that it cannot do. One line each."""


class CollectiveError(InstepError):
    """Ranks cannot exchange what was asked for."""


class TrainingError(InstepError):
    """A model or loader was used in a way that would change the numbers."""


class VerificationError(InstepError):
    """`instep verify` cannot judge this script."""


_HOMES = {
    "BackendError": "distributed.errors",
    "BrokenGroupError": "distributed.errors",
    "CannotSendError": "launch.errors",
    "CannotShardError": "training.errors",
    "CollectiveTimeoutError": "distributed.errors",
    "DeviceError": "distributed.errors",
    "DisagreementError": "distributed.errors",
    "ForkedChildError": "distributed.errors",
    "InsideScopeError": "distributed.communication.errors",
    "LaunchVariablesError": "process.errors",
    "LeftoverRendezvousError": "distributed.errors",
    "LoadingError": "unedited.errors",
    "MixedBatchesError": "training.errors",
    "MixedJobError": "distributed.errors",
    "MixedSumsError": "training.errors",
    "NameInFlightError": "distributed.negotiation.errors",
    "NegotiationError": "distributed.negotiation.errors",
    "NotAMemberError": "distributed.communication.errors",
    "OverflowedError": "distributed.communication.errors",
    "PeerDiedError": "distributed.errors",
    "PeerGaveUpError": "distributed.errors",
    "PeerLeftError": "distributed.errors",
    "PortInUseError": "distributed.errors",
    "RankFailedError": "launch.errors",
    "RendezvousError": "distributed.errors",
    "ReplicatedTwiceError": "training.errors",
    "RunOnceError": "distributed.communication.errors",
    "ScriptFailedError": "verify.errors",
    "ScriptLateError": "verify.errors",
    "ShardedTwiceError": "training.errors",
    "SharedMemoryError": "distributed.errors",
    "StartError": "launch.errors",
    "StepsError": "verify.errors",
    "AuthenticationError": "distributed.errors",
    "ShardedCallError": "unedited.errors",
    "UneditedError": "unedited.errors",
    "UnknownBatchError": "training.errors",
    "UnknownOpError": "distributed.communication.errors",
    "UnsuitableTensorError": "distributed.communication.errors",
    "WrongDeviceError": "distributed.communication.errors",
    "PrecisionError": "training.amp.errors",
}
"""Where the leaves are defined: each with the package that raises it."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"instep.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
