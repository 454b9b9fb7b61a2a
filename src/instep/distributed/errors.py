"""Errors of ranks that cannot meet, are not one job, or fail in a collective."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Mapping

from instep.distributed.conditions import advise_on_condition
from instep.errors import CollectiveError, LaunchError
from instep.process.exit_status import format_arrived, format_ranks


class PortInUseError(LaunchError):
    """Another process holds the port at which the ranks should meet."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"port {port} on {host} is in use by another process, so the ranks cannot meet there. "
            "Choose another port (MASTER_PORT, or tcp://host:port), or end the job that holds it."
        )


class LeftoverRendezvousError(LaunchError):
    """A rendezvous file that another job left behind."""


class RendezvousError(LaunchError):
    """The ranks cannot meet in the way that was asked for."""

    @classmethod
    def absent(
        cls,
        absent: Iterable[int],
        size: int,
        seconds: float,
        hosts: Mapping[int, str] | None = None,
        members: str = "rank",
    ) -> RendezvousError:
        """Some ranks, or hosts, did not arrive; `hosts` has the hosts of those that did."""
        return cls(
            f"{format_ranks(absent, members)} of {size} did not come within {seconds:.0f} seconds"
            f"{format_arrived(hosts or {}, members)}. Their own output may say why; "
            "INSTEP_TIMEOUT sets how long the others wait."
        )

    @classmethod
    def ended(cls, ended: Iterable[int], size: int, host: str) -> RendezvousError:
        return cls(
            f"{format_ranks(ended)} of {size} ended on {host} before all ranks had met, so the "
            "others would wait in vain. The output of what ended first says why."
        )

    @classmethod
    def not_connected(cls, what: str) -> RendezvousError:
        """The first ranks of two hosts; `what` names them, and the address."""
        return cls(
            f"{what}. The first ranks of the hosts exchange small tensors over such a connection. "
            "Let the hosts connect to each other at any TCP port (a firewall may not), and let "
            "GLOO_SOCKET_IFNAME name the interface that leads to the other hosts."
        )

    @classmethod
    def group_destroyed(cls) -> RendezvousError:
        return cls(
            "the ranks have parted: the process group that this belonged to is destroyed. Move the "
            "call before destroy_process_group()."
        )


class MixedJobError(LaunchError):
    """The ranks, or hosts, that were started together run different jobs."""


class AuthenticationError(LaunchError):
    """A message was written by a process that does not know this job's secret."""

    @classmethod
    def not_of_this_job(cls, name: str) -> AuthenticationError:
        return cls(
            f"what was read as {name!r} was not written by this job: a stranger's process has "
            "written to the ranks' store or connection, or a rank was started with another "
            "INSTEP_SECRET than this one. Nothing of it was used. Give all ranks the same one."
        )

    @classmethod
    def secret_missing(cls) -> AuthenticationError:
        return cls(
            "the other ranks have a secret (INSTEP_SECRET, or the file ~/.instep/secret) that this "
            "one was not given. Give all ranks the same one, or none."
        )


def rendezvous_error(name: str, text: str) -> LaunchError:
    """The error with which another process ended the rendezvous, by the name of its class."""
    known = (MixedJobError, RendezvousError, AuthenticationError)
    return next((kind for kind in known if kind.__name__ == name), LaunchError)(text)


class BackendError(LaunchError):
    """A backend of torch.distributed that this host, or this torch, does not have."""


class DeviceError(LaunchError):
    """There is no accelerator of its own for every rank."""

    @classmethod
    def not_enough(cls, ranks: int, devices: int, title: str, variable: str | None) -> DeviceError:
        """`title`: what one device is called; `variable`: the one that chooses devices."""
        more = f", make more {title}s visible ({variable})" if variable else ""
        return cls(
            f"{ranks} ranks on this host, but only {devices} {title}{'s' * (devices != 1)} "
            f"visible. Start fewer ranks{more}, or set INSTEP_DEVICE=cpu."
        )


class DisagreementError(CollectiveError):
    """The ranks passed different values where they must pass the same one."""

    caused_by_another_rank = True

    def __init__(self, what: str, seen: Mapping[str, Iterable[int]], advice: str) -> None:
        sides = "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in seen.items())
        super().__init__(f"the ranks disagree about {what}: {sides}. {advice}")

    @classmethod
    def of_collectives(cls, seen: Mapping[str, Collection[int]]) -> DisagreementError:
        """`seen`: the ranks of each collective, which is described with its line of the script."""
        return cls(
            "which collective comes next",
            dict(sorted(seen.items(), key=lambda side: min(side[1]))),
            "Every rank must call the same collectives in the same order, with equal shapes, "
            f"dtypes and roots.{advise_on_condition(seen)}",
        )


class SharedMemoryError(CollectiveError, RuntimeError):
    """There is not enough shared memory for all ranks."""

    def __init__(self, size: int, ranks: int, reason: str) -> None:
        is_limited = os.strerror(errno.EFBIG) in reason
        advice = "Raise `ulimit -f`" if is_limited else "Use smaller buckets or fewer ranks"
        super().__init__(
            f"{ranks} rank{'s' * (ranks != 1)} cannot map {size} bytes of shared memory "
            f"({reason or 'this rank could'}). {advice} on this host."
        )


class BrokenGroupError(CollectiveError, RuntimeError):
    """The ranks of a process group are out of step for good."""

    caused_by_another_rank = True


class PeerDiedError(BrokenGroupError):
    """A rank's process ended while another waited for it."""

    def __init__(self, peer: str, call: str, rank: int | None = None) -> None:
        self.rank = rank
        """That rank, where it is known."""
        super().__init__(
            f"{peer} died; this rank was waiting for it in {call}. Its own output says why."
        )


class PeerLeftError(BrokenGroupError):
    """A rank ended, or destroyed its process group, while another waited for it."""

    def __init__(self, peer: str, call: str, rank: int | None = None, side: str = "") -> None:
        """`side`: the collective in which it waited, with its line."""
        self.rank = rank
        """That rank, where it is known."""
        super().__init__(
            f"{peer} has ended, or destroyed its process group; this rank was waiting for it in "
            f"{call}. Every rank must call the same collectives.{advise_on_condition([side])}",
        )


class PeerGaveUpError(BrokenGroupError):
    """A rank stopped with an error while another waited for it."""

    def __init__(self, peer: str, call: str, reason: str) -> None:
        super().__init__(
            f"{peer} gave up; this rank was waiting for it in {call}. It said: {reason}"
        )


class CollectiveTimeoutError(BrokenGroupError):
    """A rank did not come to a collective in time."""

    def __init__(
        self, peers: Iterable[str], call: str, seconds: float, *, is_alive: bool = True
    ) -> None:
        """`is_alive`: whether that is known of all ranks."""
        missing = ", ".join(peers)
        late = f"{missing} did not come to {call}" if missing else f"{call} was not over"
        known = ", though every rank is alive" if is_alive else ", or its host cannot be reached"
        super().__init__(
            f"{late} within {seconds:g} s{known}. "
            "Find out what the ranks do (`instep where` prints it while they wait), or give them a "
            "longer timeout (INSTEP_TIMEOUT, or that of the process group).",
        )


class ForkedChildError(BrokenGroupError):
    """A forked child called a collective of its parent's process group."""

    caused_by_another_rank = False

    def __init__(self) -> None:
        super().__init__(
            "this process was forked from a rank and is none itself. "
            "Call collectives in the rank's own process, not in its loader workers.",
        )
