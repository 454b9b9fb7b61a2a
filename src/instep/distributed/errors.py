"""How ranks fail to meet, or turn out not to be one job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from instep.errors import CollectiveError, LaunchError
from instep.process.exit_status import arrivals, named


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


class DisagreementError(CollectiveError):
    """The ranks were asked for the same thing and hold different ones."""

    caused_by_another_rank = True

    def __init__(self, what: str, seen: Mapping[str, Iterable[int]], advice: str) -> None:
        sides = "; ".join(f"{value} on {named(ranks)}" for value, ranks in seen.items())
        super().__init__(f"the ranks disagree about {what}: {sides}. {advice}")


class SharedMemoryError(CollectiveError, RuntimeError):
    """There is not enough shared memory for all ranks."""

    def __init__(self, size: int, ranks: int, reason: str) -> None:
        super().__init__(
            f"{ranks} rank{'s' * (ranks != 1)} cannot map {size} bytes of shared memory "
            f"({reason or 'this rank could'}). Use smaller buckets or fewer ranks on this host."
        )


class BrokenGroupError(CollectiveError, RuntimeError):
    """The ranks of a process group are out of step for good."""

    caused_by_another_rank = True

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

    caused_by_another_rank = False

    def __init__(self) -> None:
        CollectiveError.__init__(
            self,
            "this process was forked from a rank and is none itself. "
            "Call collectives in the rank's own process, not in its loader workers.",
        )
