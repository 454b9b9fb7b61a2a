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

from collections.abc import Iterable, Mapping, Sequence

from instep.exit_status import arrivals, named


def _unpickled(kind: type[InstepError], args: tuple[object, ...]) -> InstepError:
    """An error by its sentence: not every class's constructor takes that."""
    return kind.__new__(kind, *args)


class InstepError(Exception):
    """The root: catch it to catch whatever instep raises by itself. Every one pickles."""

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


class StartError(LaunchError):
    """The operating system would not start a rank."""

    def __init__(self, rank: int, size: int, why: str) -> None:
        super().__init__(
            f"cannot start rank {rank} of {size}: {why}. Start fewer ranks, or raise the limit."
        )


class LaunchVariablesError(LaunchError):
    """The environment of this process says something impossible about its rank."""

    @classmethod
    def half_set(
        cls, source: str, present: Mapping[str, str], missing: Iterable[str]
    ) -> LaunchVariablesError:
        """Some of the variables that belong together are missing."""
        seen = ", ".join(f"{name}={value}" for name, value in present.items())
        return cls(
            f"half of what {source} sets is missing: found {seen} but not {', '.join(missing)}. "
            "Set all of them, or none (then this process is a world of one)."
        )

    @classmethod
    def not_a_number(cls, name: str, value: str) -> LaunchVariablesError:
        """A variable that must be an integer is not."""
        return cls(f"{name}={value!r} is not a whole number. Set it to one, or unset it.")

    @classmethod
    def unsuitable(cls, name: str, value: str, takes: str, meaning: str) -> LaunchVariablesError:
        """A variable has a value that it does not take."""
        return cls(f"{name} takes {takes}, not {value!r}. {meaning}")

    @classmethod
    def unknown(cls, name: str, near: str | None) -> LaunchVariablesError:
        """A variable in instep's name that it does not know."""
        advice = f"Did you mean {near}?" if near else "docs/variables.md lists what there is."
        return cls(f"instep has no variable {name}. {advice}")

    @classmethod
    def impossible(cls, source: str, what: str) -> LaunchVariablesError:
        """The numbers contradict each other."""
        return cls(
            f"{source} describes an impossible world: {what}. "
            "Check who sets these variables; two launchers inside each other are the usual cause."
        )

    @classmethod
    def short_secret(cls, where: str, shortest: int) -> LaunchVariablesError:
        """A secret that could be guessed."""
        return cls(
            f"the secret in {where} is too short: it takes {shortest} characters or more. "
            "`openssl rand -hex 32` makes a good one."
        )

    @classmethod
    def secret_file(cls, path: str, why: str) -> LaunchVariablesError:
        """A secret that is none."""
        return cls(f"the secret in {path} cannot be used: {why}. chmod 600 keeps it yours.")

    @classmethod
    def node_list(cls, text: str) -> LaunchVariablesError:
        """Hosts in a notation that is not Slurm's."""
        return cls(
            f"SLURM_STEP_NODELIST={text!r} is not a list of hosts such as node[1-3],login. "
            "Export MASTER_ADDR and MASTER_PORT (an address of rank 0's host) instead."
        )

    @classmethod
    def task_list(cls, text: str) -> LaunchVariablesError:
        """Numbers of tasks in a notation that is not Slurm's, or for too few hosts."""
        return cls(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} does not say how many tasks this host has; "
            "it should read like 2(x3),1, with a number for each host of the step."
        )


class PortInUseError(LaunchError):
    """The port at which the ranks should meet is taken."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"port {port} on {host} is in use by another process, so the ranks cannot meet there. "
            "Choose another port (MASTER_PORT, or tcp://host:port), or end the job that holds it."
        )


class LeftoverRendezvousError(LaunchError):
    """A rendezvous file that another job left behind."""

    def __init__(self, path: str, rank: int) -> None:
        super().__init__(
            f"the rendezvous file {path} was already used: rank {rank} has met there before. "
            "Delete it, and give each job a file of its own."
        )


class RendezvousError(LaunchError):
    """The ranks cannot meet in the way that was asked for."""

    @classmethod
    def no_master(cls, source: str, size: int) -> RendezvousError:
        """Nobody says where."""
        return cls(f"{source} started {size} ranks, but does not say where they meet. {_SAY_WHERE}")

    @classmethod
    def several_hosts(cls, source: str, here: int, size: int) -> RendezvousError:
        """Nobody says where, and a file of this host is no place for the others."""
        return cls(
            f"{source} started {size} ranks on several hosts ({here} on this one), but does not "
            f"say where they meet. {_SAY_WHERE}"
        )

    @classmethod
    def unresolved(cls, host: str, why: str) -> RendezvousError:
        """The master's name is not known here."""
        return cls(
            f"the master's name {host!r} does not resolve: {why}. Export MASTER_ADDR and "
            "MASTER_PORT with an address of rank 0's host that every host knows."
        )

    @classmethod
    def private_file(cls, path: str, why: str) -> RendezvousError:
        """The file of a job on one host cannot be written, or is not ours."""
        return cls(
            f"cannot meet in the file {path}: {why}. Set TMPDIR to a folder of your own, the same "
            "on every rank, or export MASTER_ADDR and MASTER_PORT."
        )

    @classmethod
    def parted(cls) -> RendezvousError:
        """A model of a process group that was destroyed is used."""
        return cls("the ranks have parted: the process group that this belonged to is destroyed.")

    @classmethod
    def absent(
        cls,
        absent: Iterable[int],
        size: int,
        seconds: float,
        came: Mapping[int, str] | None = None,
        members: str = "rank",
    ) -> RendezvousError:
        """Some ranks, or hosts, never came; `came` says on which host those are that did."""
        return cls(
            f"{named(absent, members)} of {size} did not come within {seconds:.0f} seconds"
            f"{arrivals(came or {}, members)}. Their own output may say why; "
            "INSTEP_TIMEOUT sets how long the others wait."
        )

    @classmethod
    def ended(cls, ended: Iterable[int], size: int, host: str) -> RendezvousError:
        """The processes of some ranks are not there any more, and the ranks have not met yet."""
        return cls(
            f"{named(ended)} of {size} ended on {host} before all ranks had met, so the others "
            "would wait in vain. The output of what ended first says why."
        )

    @classmethod
    def orphaned(cls) -> RendezvousError:
        """Who started the ranks is not there any more, and the ranks have not met yet."""
        return cls(
            "the process that started this rank was ended before all ranks had met, so nobody "
            "starts those that are missing, or waits for this one."
        )

    @classmethod
    def foreign_master(cls, host: str, port: int, why: str) -> RendezvousError:
        """The master's address is not one of rank 0's host."""
        return cls(
            f"rank 0 cannot listen on {host}:{port} ({why}); "
            "the master must be an address of rank 0's own host."
        )

    @classmethod
    def twice(cls, members: str, number: int, hosts: Iterable[str]) -> RendezvousError:
        """Two say that they are the same one."""
        return cls(
            f"{members} {number} has come twice, from {' and from '.join(hosts)}. "
            f"Each {members} needs a number of its own, from 0 up."
        )

    @classmethod
    def counted_differently(
        cls, members: str, count: int, host: str, number: int, told: int
    ) -> RendezvousError:
        """Not all were told the same number of members."""
        return cls(
            f"{members} 0 expects {count} {members}s, but {host} came as {members} {number} of "
            f"{told}. Start all of them with the same number."
        )


_SAY_WHERE = (
    "Export MASTER_ADDR (an address of rank 0's host) and MASTER_PORT on every rank, or "
    "INSTEP_DIST_FILE with the path of a file on a file system that all hosts share."
)


class MixedJobError(LaunchError):
    """What was started together is not one job."""

    @classmethod
    def versions(cls, seen: Mapping[str, Iterable[int]], members: str) -> MixedJobError:
        """Different versions of instep."""
        return cls(
            f"two versions of instep in one job: {_sides(seen, members)}. "
            "Install the same one everywhere, and start every rank with the same Python."
        )

    @classmethod
    def scripts(cls, seen: Mapping[str, Iterable[int]], members: str) -> MixedJobError:
        """Different scripts, or different texts of one."""
        return cls(
            f"the {members}s run different scripts: {_sides(seen, members)}. "
            "Every rank must run the same program; bring the copies up to date."
        )

    @classmethod
    def arguments(cls, seen: Mapping[str, Iterable[int]], members: str) -> MixedJobError:
        """Different arguments."""
        return cls(
            f"the {members}s were started with different arguments: {_sides(seen, members)}. "
            "Start all with the same ones; what depends on the rank belongs into the script "
            "(instep.rank)."
        )


def _sides(seen: Mapping[str, Iterable[int]], members: str) -> str:
    return "; ".join(f"{value} on {named(held, members)}" for value, held in seen.items())


class StrangerError(LaunchError):
    """What was read was written by a process that does not know this job's secret."""

    @classmethod
    def value(cls, what: str) -> StrangerError:
        """It bears no mark, or a wrong one."""
        return cls(
            f"what was read as {what!r} was not written by this job: a stranger's process has "
            "written to the ranks' store or connection, or a rank was started with another "
            "INSTEP_SECRET than this one. Nothing of it was used. Give all ranks the same one."
        )

    @classmethod
    def no_secret(cls) -> StrangerError:
        """The others mark what they write, and this rank has nothing to check it with."""
        return cls(
            "the other ranks have a secret (INSTEP_SECRET, or the file ~/.instep/secret) that this "
            "one was not given. Give all ranks the same one, or none."
        )

    @classmethod
    def not_handed_over(cls) -> StrangerError:
        """Rank 0 is there, and tells this rank of its host no secret."""
        return cls(
            "rank 0 hands no secret to this rank: it was given one of its own (INSTEP_SECRET, or "
            "the file ~/.instep/secret), or it is in another network namespace than this rank, or "
            "it has ended. Give all ranks the same INSTEP_SECRET."
        )

    @classmethod
    def in_place_of_rank_0(cls, port: int) -> StrangerError:
        """The name at which rank 0 hands over the secret is another process's."""
        return cls(
            "the socket at which rank 0 hands the job's secret to the ranks of this host belongs "
            "to another process: of another user (or of one that this user namespace does not "
            f"know), or of another job with the port {port}. "
            "Nothing of it was used. Give all ranks the same INSTEP_SECRET, or take another port."
        )

    @classmethod
    def unequal(cls, without: Iterable[int], others: Iterable[int]) -> StrangerError:
        """Ranks that have met by the script's own means have unlike secrets."""
        return cls(
            f"{named(without)} has another INSTEP_SECRET (or ~/.instep/secret), or none, than "
            f"{named(others)}. Give all ranks the same one, or none."
        )


class BackendError(LaunchError):
    """A backend of torch.distributed that this host, or this torch, does not have."""

    @classmethod
    def no_gpu(cls, torch: str) -> BackendError:
        """NCCL without a GPU."""
        return cls(
            f"the backend 'nccl' needs GPUs, and torch {torch} sees none on this host. "
            "Say 'gloo' for CPUs, or no backend at all: then torch takes what the host has. "
            "On a GPU host, look at CUDA_VISIBLE_DEVICES and at which build of torch this is."
        )

    @classmethod
    def no_mpi(cls, torch: str) -> BackendError:
        """MPI without an MPI build of torch."""
        return cls(
            f"the backend 'mpi' needs a torch that was built from source with MPI; torch {torch} "
            "was not. Say 'nccl' (GPUs) or 'gloo' (CPUs): mpirun may start the ranks all the same."
        )


class RankFailedError(LaunchError):
    """A rank that `instep.spawn` started failed; the message ends with its traceback."""

    def __init__(self, report: str, rank: int, code: int) -> None:
        super().__init__(report)
        self.rank = rank
        """Which rank failed first."""
        self.code = code
        """Its exit code; 128 + n for signal n."""


class CannotSendError(LaunchError, TypeError):
    """A function, an argument or a result that does not pickle."""

    @classmethod
    def call(cls, name: str, why: str) -> CannotSendError:
        """From the caller to the ranks."""
        return cls(
            f"{name} and its arguments cannot be sent to the ranks: {why}. Open files, locks and "
            "connections inside the function instead."
        )

    @classmethod
    def result(cls, name: str, why: str) -> CannotSendError:
        """From a rank to the caller."""
        return cls(
            f"what {name} returned cannot be sent back: {why}. Return something that pickles, "
            "or None."
        )


class DeviceError(LaunchError):
    """There is no accelerator of its own for every rank."""

    @classmethod
    def too_few(cls, ranks: int, devices: int) -> DeviceError:
        """More ranks on a host than accelerators."""
        return cls(
            f"{ranks} ranks on this host, but only {devices} GPU{'s' * (devices != 1)} visible. "
            "Start fewer ranks, make more GPUs visible (CUDA_VISIBLE_DEVICES), "
            "or set INSTEP_DEVICE=cpu."
        )

    @classmethod
    def shared(cls, device: str, ranks: Iterable[int]) -> DeviceError:
        """Two ranks were given the same accelerator."""
        return cls(
            f"{named(ranks)} share one GPU ({device}); each rank needs its own. "
            "Give every task one GPU, or start as many ranks as there are GPUs."
        )


class UneditedError(LaunchError):
    """This script cannot run unedited on several ranks."""

    @classmethod
    def own_processes(cls, how: str) -> UneditedError:
        """It starts processes that train."""
        return cls(
            f"this script starts training processes of its own ({how}); on several ranks each "
            "would start them all. Run it with one rank (-n 1), or with --plain."
        )

    @classmethod
    def cannot_tell(cls, what: str, kind: str, why: str) -> UneditedError:
        """What rank 0 has done for all does not pickle."""
        return cls(
            f"rank 0 did this for all ranks: {what}; but what came of it, a value of type {kind}, "
            f"cannot be sent to the others: {why}. Let it give text, bytes or plain values, or "
            "run this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def stream_of_command(cls, what: str) -> UneditedError:
        """It wants the file descriptor of a stream that only rank 0 has."""
        return cls(
            f"this script asks for {what}, but only rank 0 has the command, and tells the other "
            "ranks what it writes. Use read, readline, write or communicate; or run this script "
            "with one rank (-n 1), or with --plain."
        )

    @classmethod
    def pipe_to_command(cls, fd: int) -> UneditedError:
        """It gives a command a pipe or socket, of which only rank 0 would hear anything."""
        return cls(
            f"this script gives a command a pipe or a socket of its own (file descriptor {fd}); "
            "only rank 0 starts the command, and the other ranks would not hear from it. Use "
            "subprocess.PIPE or a file; or run this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def temporary_elsewhere(cls, path: str) -> UneditedError:
        """A command has changed a temporary file of rank 0's on another host."""
        return cls(
            f"a command has worked on the temporary file {path} of rank 0's host, which this "
            "rank's host does not see. Let it work in the script's own folder, or run this "
            "script on one host, or with --plain."
        )

    @classmethod
    def elsewhere(cls) -> UneditedError:
        """A command that the script started is used where the ranks do different work."""
        return cls(
            "only rank 0 has this command, and it is used where the ranks do different work (in "
            "a module's forward, a data loader or a forked process). Start it there, too; or run "
            "this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def asyncio_commands(cls) -> UneditedError:
        """asyncio watches a command by its process id and file descriptors."""
        return cls(
            "this script starts commands by asyncio, which several ranks cannot share. Use "
            "subprocess.run or Popen; or run this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def not_kept(cls, path: str, size: int) -> UneditedError:
        """It reads, on a rank other than 0, a large file that rank 0 has written over already."""
        return cls(
            f"this rank reads {path} ({size / 2**30:.1f} GiB) after rank 0 has written over it. "
            "Of that, rank 0 keeps at most 1 GiB for the others, less where TMPDIR is full, more "
            "only where it lies on the same file system and that shares blocks (btrfs, XFS). Write "
            "the new content under another name."
        )

    @classmethod
    def too_late(cls, reason: str) -> UneditedError:
        """It asks to be left alone after work was divided, or after the first backward."""
        return cls(
            f"this script's work was begun as one process's on all ranks, and now {reason}. "
            "Run it with --plain, as a script for several processes."
        )


class CollectiveError(InstepError):
    """Ranks cannot exchange what was asked for."""


class UnknownOpError(CollectiveError, ValueError):
    """A reduction that does not exist."""

    def __init__(self, op: object, known: Iterable[str]) -> None:
        super().__init__(f"unknown reduction {op!r}; known are {', '.join(known)}.")


class WrongDeviceError(CollectiveError):
    """A tensor lies where this job's ranks cannot talk."""

    def __init__(self, device: object, reachable: Iterable[str]) -> None:
        super().__init__(
            f"this job's ranks exchange tensors on {' and '.join(reachable)}, "
            f"but this tensor is on {device}. Move it there first."
        )


class UnsuitableTensorError(CollectiveError, TypeError):
    """A collective was given something that it has no meaning for."""

    @classmethod
    def not_a_tensor(cls, value: object) -> UnsuitableTensorError:
        """Some other Python value."""
        return cls(
            f"this collective takes tensors, not {type(value).__name__}. For other values there "
            "are broadcast_object, all_gather_object and gather_object."
        )

    @classmethod
    def not_dense(cls, layout: object) -> UnsuitableTensorError:
        """A sparse tensor."""
        return cls(f"ranks exchange dense tensors, not {layout}. Call to_dense() first.")

    @classmethod
    def no_mean(cls, dtype: object) -> UnsuitableTensorError:
        """Integers and truth values."""
        return cls(f"the mean of {dtype} is no {dtype}; use op='sum', or convert it first.")

    @classmethod
    def no_order(cls, dtype: object) -> UnsuitableTensorError:
        """Complex numbers."""
        return cls(f"{dtype} has no order, so no min or max; reduce its abs() or its real part.")

    @classmethod
    def no_rows(cls) -> UnsuitableTensorError:
        """A number where rows are divided."""
        return cls("this tensor has no dimension 0 to divide; reshape it first.")


class OverflowedError(CollectiveError, OverflowError):
    """The sum or product over ranks does not fit the dtype."""

    def __init__(self, op: str, dtype: object, value: int) -> None:
        super().__init__(
            f"the {op} over ranks reaches {value}, which {dtype} cannot hold. "
            "Convert the tensor to torch.int64 first."
        )


class NotAMemberError(CollectiveError, ValueError):
    """A rank takes part in a collective of a group that it is not in."""

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        super().__init__(
            f"rank {rank} talks in the group of {named(members)}, but is not in it. "
            "Call this on the group's members only: if instep.rank in group."
        )


class InsideScopeError(CollectiveError):
    """A collective inside of a run-once scope, where there is nobody to talk to."""

    def __init__(self, what: str, line: str, rank: int, scope: str) -> None:
        super().__init__(
            f"torch.distributed's {what} at {line} is inside the single_process_scope of rank "
            f"{rank} ({scope}); the other ranks are waiting for its end. "
            "Move it out of the scope; instep's own collectives are those of a world of one there."
        )


class RunOnceError(InstepError):
    """A run-once scope could not hand its value or its exception to every rank."""

    @classmethod
    def value(cls, rank: int, scope: str, kind: str, why: str) -> RunOnceError:
        """Its value does not pickle."""
        return cls(
            f"the single_process_scope of rank {rank} ({scope}) returned a {kind} that cannot be "
            f"sent to the other ranks: {why}. Return something that pickles, or None."
        )

    @classmethod
    def exception(cls, rank: int, scope: str, kind: str, trace: str) -> RunOnceError:
        """Its exception does not pickle."""
        return cls(
            f"the single_process_scope of rank {rank} ({scope}) raised {kind}, an exception that "
            f"does not pickle. On rank {rank}:\n\n{trace}"
        )

    @classmethod
    def not_asked(cls, scope: str) -> RunOnceError:
        """The with form without its `if`."""
        return cls(
            f"the body of the single_process_scope at {scope} ran on every rank, because Python "
            "cannot skip it. Write `with instep.single_process_scope() as here:` and inside "
            "`if here:`, or decorate a function."
        )

    @classmethod
    def lost(cls, rank: int, scope: str, seen: str) -> RunOnceError:
        """The rank that runs the scope is gone."""
        return cls(
            f"rank {rank} ended inside its single_process_scope ({scope}): {seen}. "
            "Its own output says why; the others cannot go on without it."
        )


class DisagreementError(CollectiveError):
    """The ranks were asked for the same thing and hold different ones."""

    def __init__(self, what: str, seen: Mapping[str, Iterable[int]], advice: str) -> None:
        sides = "; ".join(f"{value} on {named(ranks)}" for value, ranks in seen.items())
        super().__init__(f"the ranks disagree about {what}: {sides}. {advice}")


class NameInFlightError(CollectiveError, ValueError):
    """A name was submitted again before its first collective was over."""

    def __init__(self, name: str, line: str) -> None:
        super().__init__(
            f"{name} is already under way on this rank (submitted at {line}). Ranks are matched by "
            "names: wait for the first one, or give the second a name of its own."
        )


class NegotiationError(CollectiveError, RuntimeError):
    """A collective that ranks are matched to by its name cannot take place."""

    @classmethod
    def mismatch(
        cls, what: str, name: str, seen: Mapping[str, Iterable[int]], advice: str
    ) -> NegotiationError:
        """The ranks mean different things by one name."""
        return cls(str(DisagreementError(f"{what} of {name}", seen, advice)))

    @classmethod
    def joined(cls, name: str, kind: str, ranks: Iterable[int], line: str) -> NegotiationError:
        """Some ranks have no data left, and this cannot do without them."""
        return cls(
            f"{name} ({line}) is of the kind {kind}, and {named(ranks)} already called join(): a "
            "rank that joined can only add zeros to sums and averages. Call it before any joins."
        )

    @classmethod
    def left(cls, rank: int, size: int) -> NegotiationError:
        """A rank shut its side down, or its process ended."""
        return cls(
            f"rank {rank} of {size} has ended or called shutdown(), so collectives with it are "
            "over. Its own output may say why; let every rank submit the same ones before that."
        )

    @classmethod
    def stalled(cls, text: str) -> NegotiationError:
        """A rank did not come, and the user wants an end then."""
        return cls(f"{text} The job asked to end now rather than wait.")

    @classmethod
    def failed(cls, name: str, why: object) -> NegotiationError:
        """The exchange itself broke off."""
        return cls(f"{name} broke off: {why}. A rank that ended is the usual cause.")


class VerificationError(InstepError):
    """`instep verify` cannot judge this script."""


def _at(n: int) -> str:
    return f"at n = {n}" if n else "in plain Python"


class ScriptFailedError(VerificationError):
    """A run of the script ended with an error."""

    def __init__(self, n: int, words: str, steps: Iterable[int]) -> None:
        made = ", ".join(map(str, steps))
        hint = ""
        if any(sign in words for sign in ("EOFError", "Inappropriate ioctl", "not a tty")):
            hint = (
                "\nThe script reads its standard input or needs a terminal; here it has neither. "
                "Give it what it asks for as arguments."
            )
        super().__init__(
            f"the script fails {_at(n)}, after {made or 'no'} steps on its ranks:\n{words}{hint}"
        )


class ScriptLateError(VerificationError):
    """A run of the script was ended because it took too long."""

    def __init__(self, n: int, seconds: float, steps: Iterable[int]) -> None:
        made = ", ".join(map(str, steps))
        super().__init__(
            f"the script has not ended {_at(n)} after {seconds:.0f} seconds, far longer than one "
            f"process needs; its ranks have made {made} steps. Do all ranks decide alike?"
        )


class StepsError(VerificationError):
    """There is nothing to compare."""

    def __init__(self, n: int) -> None:
        super().__init__(
            f"the script makes no step of a torch.optim optimizer {_at(n)}, so there is no "
            "training to compare."
        )


class SharedMemoryError(CollectiveError, RuntimeError):
    """There is not enough shared memory for all ranks."""

    def __init__(self, size: int, ranks: int, reason: str) -> None:
        super().__init__(
            f"{ranks} rank{'s' * (ranks != 1)} cannot map {size} bytes of shared memory "
            f"({reason or 'this rank could'}). Use smaller buckets or fewer ranks on this host."
        )


class BrokenGroupError(CollectiveError, RuntimeError):
    """The ranks of a process group are out of step for good."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"an earlier collective of this process group failed: {cause} "
            "Destroy the group and make a new one, or end the job."
        )


class PeerDiedError(BrokenGroupError):
    """A rank's process ended while another waited for it."""

    def __init__(self, peer: str, call: str, rank: int | None = None) -> None:
        self.rank = rank
        """That rank, where it is known."""
        CollectiveError.__init__(
            self, f"{peer} died; this rank was waiting for it in {call}. Its own output says why."
        )


class PeerLeftError(BrokenGroupError):
    """A rank destroyed its process group while another waited for it."""

    def __init__(self, peer: str, call: str, rank: int | None = None) -> None:
        self.rank = rank
        """That rank, where it is known."""
        CollectiveError.__init__(
            self,
            f"{peer} destroyed its process group; this rank was waiting for it in {call}. "
            "Every rank must call the same collectives.",
        )


class PeerGaveUpError(BrokenGroupError):
    """A rank stopped with an error while another waited for it."""

    def __init__(self, peer: str, call: str, reason: str) -> None:
        CollectiveError.__init__(
            self, f"{peer} gave up; this rank was waiting for it in {call}. It said: {reason}"
        )


class CollectiveTimeoutError(BrokenGroupError):
    """A rank did not come to a collective in time."""

    def __init__(self, peers: Iterable[str], call: str, seconds: float) -> None:
        missing = ", ".join(peers)
        late = f"{missing} did not come to {call}" if missing else f"{call} was not over"
        CollectiveError.__init__(
            self,
            f"{late} within {seconds:g} s, though every rank is alive. "
            "Find out what the ranks are doing, or give the process group a longer timeout.",
        )


class ForkedChildError(BrokenGroupError):
    """A forked child called a collective of its parent's process group."""

    def __init__(self) -> None:
        CollectiveError.__init__(
            self,
            "this process was forked from a rank and is none itself. "
            "Call collectives in the rank's own process, not in its loader workers.",
        )


class TrainingError(InstepError):
    """A model or loader was used in a way that would change the numbers."""


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
    """There is no way to cut a block out of this."""


class UndividedError(TrainingError):
    """A module's call cannot be divided among the ranks."""

    @classmethod
    def began_to_draw(cls, name: str) -> UndividedError:
        """A module whose calls drew no random numbers draws some, when it is too late."""
        return cls(
            f"{name} began to draw random numbers in its forward, which it did not before, and "
            "has changed its buffers meanwhile. Run this script with --plain, or let it draw from "
            "the first call on (a dropout of 1e-9, say)."
        )

    @classmethod
    def other_outputs(cls, name: str) -> UndividedError:
        """A planned call returned something of another structure."""
        return cls(
            f"{name} returns something else than when its division was proven (another number of "
            "outputs, or others). Run this script with --plain, or keep what it returns the same "
            "for the same kind of arguments."
        )

    @classmethod
    def changes_arguments(cls, name: str) -> UndividedError:
        """A planned call has changed what it was called with, which only this rank's copy shows."""
        return cls(
            f"{name} began to change its arguments in its forward (a cache, a dict, a tensor in "
            "place), which it did not do when its division was proven. Run this script with "
            "--plain, or let it return what is new instead."
        )


class LoadingError(TrainingError, RuntimeError):
    """A rank could not load its rows, and its exception does not get to the others as it is."""

    def __init__(self, rank: int, kind: str, trace: str) -> None:
        super().__init__(
            f"rank {rank} raised {kind} while it loaded its rows of a batch, an exception that "
            f"cannot be sent to the other ranks. Its traceback:\n\n{trace}"
        )


class MixedSumsError(TrainingError):
    """Ranks have added up the gradients of different parameters."""

    @classmethod
    def of_models(cls) -> MixedSumsError:
        """In what leaves when backward has come by it."""
        return cls(
            "this rank summed the gradients of one model while another rank summed those of "
            "another. Let every rank's backward pass by the same models, in the same order."
        )

    @classmethod
    def of_hooked(cls, shape: tuple[int, ...]) -> MixedSumsError:
        """In what is summed on the spot, because a hook is to see it."""
        return cls(
            f"a parameter of shape {shape} with a gradient hook was used on this rank, while "
            "another rank used another one. What has hooks must be used on every rank in each "
            "step, or on none."
        )


class UnknownBatchError(TrainingError):
    """A forward may belong to batches of different sizes, and nothing tells to which."""

    def __init__(self, rows: Sequence[int], batches: Sequence[tuple[int, int]]) -> None:
        seen = ", ".join(map(str, rows)) or "no"
        listed = ", ".join(f"one of {total} samples ({count} here)" for total, count in batches)
        super().__init__(
            f"a forward's inputs have {seen} rows on this rank, and they may belong to different "
            f"batches: {listed}. Its gradient must be weighted by the batch's share, so pass the "
            "model the tensors that the sharded loader yields or views of them; or divide the "
            "other tensors by instep.shard; or, if something loads ahead on its way to the "
            "model, shard that: instep.shard(prefetcher)."
        )


class MixedBatchesError(TrainingError):
    """One backward through two batches of which this rank holds different fractions."""

    def __init__(self, weights: Iterable[float]) -> None:
        shares = " and ".join(f"{weight:.6g}" for weight in sorted(weights))
        super().__init__(
            f"one backward goes through two batches of which this rank holds different shares "
            f"({shares}); one weight cannot be right for both. Call backward() once for each "
            "batch's loss: the gradients add up to the same."
        )
