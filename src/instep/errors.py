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

from collections.abc import Sequence
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

    @classmethod
    def number_of_ranks(cls, value: str, flag: str = "-n") -> CommandLineError:
        """-n with something else than a positive whole number."""
        return cls(f"{flag} takes the number of ranks, a whole number from 1 up, not {value!r}.")

    @classmethod
    def no_number_of_ranks(cls, program: Sequence[str]) -> CommandLineError:
        """No -n, or one behind the script's name, where it is the script's."""
        late = next((word for word in program[1:] if word in ("-n", "-np", "--nproc")), None)
        script = program[0] if program and program[0] != "-m" else "train.py"
        what = f"{late} comes before the script" if late else "say how many ranks"
        return cls(f"{what}: instep run -n 2 {script}")

    @classmethod
    def several_hosts(cls, why: str) -> CommandLineError:
        """--nnodes, --node-rank and --master that do not go together."""
        return cls(
            f"{why}. On every host: instep run --nnodes 2 --node-rank K --master HOST:PORT -n 2 "
            "script.py, with K from 0 up, and an address of host 0."
        )

    @classmethod
    def tasks_of_one_host(cls, source: str, tasks: int, ranks: int) -> CommandLineError:
        """Several supervisors on one host, each of which would start all ranks of the host."""
        return cls(
            f"{source} started {tasks} tasks on this host, and each would start {ranks} ranks. "
            "Start one task per host (--ntasks-per-node=1), or the script itself without "
            "`instep run`; with --nnodes 1 each task is a job of its own."
        )

    @classmethod
    def nothing_to_run(cls) -> CommandLineError:
        """Neither a script nor a module."""
        return cls("nothing to run: name a script.py, or -m and a module.")

    @classmethod
    def script(cls, path: str, why: str, advice: str = "Name a Python script.") -> CommandLineError:
        """A script that cannot be run."""
        return cls(f"cannot run {path}: {why}. {advice}")

    @classmethod
    def output_folder(cls, path: str, why: str) -> CommandLineError:
        """A folder for the output that cannot be written."""
        return cls(f"cannot write the ranks' output to {path}: {why}. Choose another folder.")

    @classmethod
    def numbers_of_ranks(cls, value: str) -> CommandLineError:
        """-n of `instep verify` with something else than positive whole numbers."""
        return cls(f"-n takes numbers of ranks such as 1,2,3, not {value!r}.")

    @classmethod
    def steps(cls, value: str) -> CommandLineError:
        """--steps with something else than a positive whole number."""
        return cls(f"--steps takes a whole number from 1 up, not {value!r}.")

    @classmethod
    def report_file(cls, path: str, why: str = "") -> CommandLineError:
        """A file for the report that cannot be written."""
        why = why or "its folder may not be written, or it is a folder"
        return cls(f"cannot write {path}: {why}.")

    @classmethod
    def not_there(cls, flag: str) -> CommandLineError:
        """A flag of Horovod's for something that instep does not have."""
        return cls(
            f"{flag} is not there: jobs keep their ranks, and there is no timeline and no "
            "configuration file. Leave it out."
        )

    @classmethod
    def not_a_number(cls, what: str, value: str) -> CommandLineError:
        """A flag's value that should be one."""
        return cls(f"{what} is a whole number, not {value!r}.")

    @classmethod
    def slots(cls, size: int, slots: int) -> CommandLineError:
        """More ranks than the hosts are said to take."""
        return cls(f"-np {size}, but the hosts have {slots} slots. Give them more, or start fewer.")

    @classmethod
    def other_host(cls, host: str) -> CommandLineError:
        """A host that is not this one."""
        return cls(
            f"instep horovodrun starts ranks on this host only, not on {host}. Start the script "
            "with srun or mpirun on several: `mpirun -np N python -m instep script.py`."
        )

    @classmethod
    def hosts_file(cls, path: str, why: str) -> CommandLineError:
        """--hostfile that cannot be read."""
        return cls(f"cannot read the hosts in {path}: {why}.")

    @classmethod
    def interpreter_option(cls, option: str) -> CommandLineError:
        """python with options of its own."""
        return cls(f"the ranks' Python takes no {option}; write: python script.py, or python -m.")

    @classmethod
    def not_python(cls, program: str) -> CommandLineError:
        """A program that is none of Python's."""
        return cls(f"the program is a Python script, as in `python train.py`, not {program!r}.")

    @classmethod
    def no_sbatch(cls) -> CommandLineError:
        """--submit where Slurm is not."""
        return cls("--submit needs sbatch, which is not here. Submit from a login node.")

    @classmethod
    def no_matplotlib(cls) -> CommandLineError:
        """--plot without the library that plots."""
        return cls("--plot needs matplotlib. Install it with: pip install 'instep[plot]'")


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
    "StrangerError": "distributed.errors",
    "UndividedError": "unedited.errors",
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
