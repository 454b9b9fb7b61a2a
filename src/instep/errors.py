"""Every error that instep raises, as a tree. Each class is defined in the package that raises it.

InstepError
├── LaunchError                   this job was started in a way that cannot work
│   ├── CommandLineError          wrong options or arguments of `instep`
│   ├── StartError                the system could not start a rank
│   ├── LaunchVariablesError      variables half set, contradictory or not numbers
│   ├── PortInUseError            another process holds the master's port
│   ├── LeftoverRendezvousError   a rendezvous file of another job
│   ├── RendezvousError           the ranks cannot meet as asked
│   ├── AuthenticationError       a message of a process without this job's secret
│   ├── DeviceError               no accelerator for this rank, or one for two ranks
│   ├── MixedJobError             ranks of different scripts, arguments or versions
│   ├── BackendError              a backend that this host does not have
│   ├── RankFailedError           a rank that `instep.spawn` started failed
│   ├── CannotSendError           (TypeError) `instep.spawn` cannot pickle a call or a result
│   ├── BitwiseError              `--bitwise` with a number of ranks or a script that cannot be
│   └── UneditedError             a script that cannot run unedited on several ranks
│       └── CannotSaveScriptError   `--checkpoint` with a script whose state cannot be saved
├── RunOnceError                  a run-once scope that cannot send its result
├── CollectiveError               ranks cannot run this collective
│   ├── UnknownOpError            (ValueError) a reduction that does not exist
│   ├── WrongDeviceError          a tensor on a device that the process group does not serve
│   ├── UnsuitableTensorError     (TypeError) a tensor for which this collective is not defined
│   ├── OverflowedError           (OverflowError) a sum of integers that its dtype cannot hold
│   ├── NotAMemberError           (ValueError) a rank in a collective of a group without it
│   ├── InsideScopeError          a collective inside of a run-once scope
│   ├── DisagreementError         the ranks passed different values
│   ├── NameInFlightError         (ValueError) a name is submitted twice
│   ├── NegotiationError          (RuntimeError) a named collective that cannot take place
│   ├── SharedMemoryError         (RuntimeError) not enough of it for all ranks
│   └── BrokenGroupError          (RuntimeError) the ranks are out of step for good
│       ├── PeerDiedError         a rank's process ended
│       ├── PeerLeftError         a rank destroyed its process group
│       ├── PeerGaveUpError       a rank stopped with an error
│       ├── CollectiveTimeoutError   a rank did not call it in time
│       └── ForkedChildError      a forked child is not a rank
├── VerificationError             `instep verify` cannot judge this script
│   ├── ScriptFailedError         the script failed at some number of ranks
│   ├── ScriptLateError           it took far longer there than in one process
│   └── StepsError                it does no training step
└── TrainingError                 a use of instep that would change the numbers
    ├── ReplicatedTwiceError
    ├── ShardedTwiceError
    ├── CannotShardError          (TypeError) a loader or batch that has no blocks
    ├── LoadingError              (RuntimeError) a rank could not load its rows of a batch
    ├── ShardedCallError          a module's call that cannot be sharded over the ranks
    ├── DriftError                parameters or learning rates that differ between ranks
    ├── NonFiniteGradError        a gradient that is infinite or not a number
    ├── MixedSumsError            gradients of different parameters summed by different ranks
    ├── EmptyBlockError           a collate_fn has left out all of a rank's samples of a batch
    ├── UnknownBatchError         the batch of a forward is not known
    ├── CapturedStepError         a CUDA graph captures the forward of a replica in training
    ├── MixedBatchesError         two batches of different weights in one backward
    ├── OtherDataError            a loader's data are not those of the checkpoint
    ├── CheckpointError           a checkpoint cannot be written, read or loaded
    │   ├── CannotSaveError       (TypeError) a value that has no place in a checkpoint
    │   ├── DamagedCheckpointError   a file of it is missing, cut off or changed
    │   ├── FolderInUseError      another job writes to the folder
    │   ├── NewerFormatError      a later version of instep wrote it
    │   └── OtherModelError       it does not fit what it is to be loaded into
    └── PrecisionError            (RuntimeError) mixed precision; see instep.training.amp.errors

InstepWarning (UserWarning)       instep cannot keep something the same

The classes in parentheses are built-in bases, by which a caller may catch the error, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar


def _unpickle(error: type[InstepError], args: tuple[object, ...]) -> InstepError:
    """Makes an error from its message: not every class's constructor takes that."""
    return error.__new__(error, *args)


class InstepError(Exception):
    """The base of all errors of instep. Every one pickles."""

    caused_by_another_rank: ClassVar[bool] = False
    """Whether another rank's failure, departure or different calls led to it."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (type(self), self.args), self.__dict__


class InstepWarning(UserWarning):
    """Something that instep cannot keep the same, shown once."""


class LaunchError(InstepError):
    """This job was started in a way that cannot work."""


class CommandLineError(LaunchError):
    """Wrong options or arguments of `instep`. One line each."""


class CollectiveError(InstepError):
    """Ranks cannot run this collective."""


class TrainingError(InstepError):
    """A model or loader was used in a way that would change the numbers."""


class VerificationError(InstepError):
    """`instep verify` cannot judge this script."""


_DEFINED_IN = {
    "distributed.communication.errors": """
        InsideScopeError NotAMemberError OverflowedError RunOnceError UnknownOpError
        UnsuitableTensorError WrongDeviceError""",
    "distributed.errors": """
        AuthenticationError BackendError BrokenGroupError CollectiveTimeoutError DeviceError
        DisagreementError ForkedChildError LeftoverRendezvousError MixedJobError PeerDiedError
        PeerGaveUpError PeerLeftError PortInUseError RendezvousError SharedMemoryError""",
    "distributed.negotiation.errors": "NameInFlightError NegotiationError",
    "launch.errors": "CannotSendError RankFailedError StartError",
    "process.errors": "LaunchVariablesError",
    "training.amp.errors": "PrecisionError",
    "training.checkpoint.errors": """
        CannotSaveError CheckpointError DamagedCheckpointError FolderInUseError NewerFormatError
        OtherModelError""",
    "training.errors": """
        BitwiseError CannotShardError CapturedStepError DriftError EmptyBlockError MixedBatchesError
        MixedSumsError NonFiniteGradError OtherDataError ReplicatedTwiceError ShardedTwiceError
        UnknownBatchError""",
    "unedited.errors": "CannotSaveScriptError LoadingError ShardedCallError UneditedError",
    "verify.errors": "ScriptFailedError ScriptLateError StepsError",
}
"""The classes that other packages define, imported at their first use from here."""


def __getattr__(name: str) -> Any:
    for module, names in _DEFINED_IN.items():
        if name in names.split():
            return getattr(import_module(f"instep.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *" ".join(_DEFINED_IN.values()).split()]
