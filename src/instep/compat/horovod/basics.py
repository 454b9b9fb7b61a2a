"""init and shutdown, the numbers of this rank and of its job, process sets, *_built."""

from __future__ import annotations

import atexit
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep.compat.horovod import driver_client
from instep.compat.horovod.errors import (
    NotInitializedError,
    UnsupportedFeatureError,
    WrongArgumentError,
)
from instep.distributed.communication import groups
from instep.distributed.errors import BrokenGroupError, RendezvousError
from instep.distributed.flight_record import timeline_file
from instep.distributed.identity.world import World
from instep.distributed.negotiation.coordinator import StallCheck
from instep.distributed.negotiation.message_table import Request
from instep.distributed.negotiation.negotiator import Negotiator, Task
from instep.distributed.rendezvous import bootstrap, stores
from instep.distributed.watchdog.call_stack import script_line
from instep.process import print_line, settings
from instep.process.process_value import ProcessValue


class HorovodSession:
    """Everything between one init() and its shutdown()."""

    def __init__(self) -> None:
        self.negotiator = Negotiator(_stall_check())
        self.unnamed: Counter[tuple[object, ...]] = Counter()
        """The number of collectives without a name, by collective and process set."""


_session = ProcessValue[HorovodSession | None](None)


def session() -> HorovodSession:
    """The current session. Raises NotInitializedError."""
    if _session.value is None:
        raise NotInitializedError
    return _session.value


after_init: list[Callable[[], None]] = []
"""Called in each `init`."""


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Meet the other ranks; does nothing if they have met.

    Args:
        comm: None or a list of all ranks, since the launcher decides which ranks there are.
        process_sets: ProcessSets to register at once. "dynamic" has no meaning here: sets can
            always be added.

    In an elastic job the driver says which ranks these are; one that it does not need any more
    ends here, with exit code 0.

    The file that HOROVOD_TIMELINE names gets a timeline, as INSTEP_TIMELINE's does, with marks for
    cycles under HOROVOD_TIMELINE_MARK_CYCLES. DYNAMIC names none: in Horovod it only allows
    `start_timeline`.

    Collective; may be called again after shutdown(). Raises UnsupportedFeatureError for another
    `comm`, LaunchError.
    """
    if comm is not None and not isinstance(comm, Sequence):
        raise UnsupportedFeatureError.communicator()
    if is_initialized():
        return
    if comm and sorted(comm) != [*range(bootstrap.current().size)]:
        raise UnsupportedFeatureError.some_ranks(comm, bootstrap.current().size)
    if (file := os.environ.get("HOROVOD_TIMELINE", "")) not in ("", "DYNAMIC"):
        os.environ.setdefault(settings.TIMELINE.name, file)
    _session.value = _join()
    for function in after_init:
        function()
    if os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"):
        timeline_file.mark_cycles()
    atexit.register(shutdown)
    global_process_set.ranks = list(range(size()))
    global_process_set.process_set_id = 0
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def _join() -> HorovodSession:
    """Meet the other ranks; in an elastic job those of the next world."""
    driver = driver_client.connect()
    if driver is None:
        return HorovodSession()
    while True:
        driver.join()
        try:
            # A rank that ends now is noticed by nobody before the others' time is up.
            bootstrap.init(timeout=timedelta(seconds=driver_client.RENDEZVOUS_SECONDS))
            return HorovodSession()
        except (RendezvousError, BrokenGroupError, dist.DistError) as error:
            print_line(f"meeting again: {error}")
            leave_world()


def leave_world() -> None:
    """In an elastic job: end what connects this process with the other ranks of its world."""
    shutdown()
    bootstrap.leave()
    stores.clear()


def shutdown() -> None:
    """Leave the job; does nothing before init().

    The collectives that other ranks have under way end with HorovodInternalError there.
    """
    ending = _session.value
    if ending is None:
        return
    atexit.unregister(shutdown)
    for process_set in (*_registered, global_process_set):
        process_set.process_set_id = None
    _registered.clear()
    global_process_set.ranks = None
    _session.value = None
    ending.negotiator.close()


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not."""
    return _session.value is not None


def world() -> World:
    """This rank and the size of its job. Raises NotInitializedError."""
    session()
    return bootstrap.current()


def rank() -> int:
    """The number of this rank in the job."""
    return world().rank


def size() -> int:
    """The number of ranks in the job."""
    return world().size


def local_rank() -> int:
    """The number of this rank on its host."""
    return world().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """The number of this host."""
    return world().node_rank


def cross_size() -> int:
    """The number of hosts."""
    return world().nodes


def is_homogeneous() -> bool:
    """Whether every host has as many ranks as this one."""
    return world().local_size * world().nodes == world().size


def _stall_check() -> StallCheck:
    """Horovod's variables for ranks that wait for others; 0 means never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return StallCheck(None, None)
    warn = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60"))
    end = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"))
    return StallCheck(warn or None, end or None)


# ------------------------------------------------------------------------------- process sets


class ProcessSet:
    """Some of the ranks. Registered by `add_process_set` or `init(process_sets=...)`."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise UnsupportedFeatureError.communicator()
        ranks = list(ranks_or_comm)
        if len(set(ranks)) < len(ranks) or not all(isinstance(r, int) for r in ranks):
            raise WrongArgumentError.ranks(ranks)
        self.ranks: list[int] | None = sorted(ranks)
        """Ascending: the order of gathered results."""
        self.process_set_id: int | None = None
        """0 for all ranks; None before it is registered and after it was removed."""

    def size(self) -> int | None:
        """The number of its ranks; None if it is not registered."""
        return None if self.process_set_id is None else len(self.members)

    def rank(self) -> int | None:
        """The number of this rank in the set; None if the set is not registered.

        (Roots are global ranks.) Raises ValueError on ranks that are not in it.
        """
        return None if self.process_set_id is None else self.members.index(rank())

    def included(self) -> bool | None:
        """Whether this rank is in it; None before init()."""
        return None if self.ranks is None else rank() in self.ranks

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks. Raises NotInitializedError, and WrongArgumentError if it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            session()  # raises where init() was forgotten
            raise WrongArgumentError(
                f"the process set of the ranks {self.ranks} is not registered. Call "
                "hvd.add_process_set(ranks) on every rank after hvd.init()."
            )
        return tuple(self.ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.ranks = None

_registered: list[ProcessSet] = []
_set_numbers = itertools.count(1)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it.

    Collective: every rank calls it with the same ranks, members or not. Raises WrongArgumentError
    for ranks that do not exist or have a set already, NegotiationError if the ranks disagree.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= size():
        raise WrongArgumentError.ranks(ranks)
    if any(known.ranks == ranks for known in (*_registered, global_process_set)):
        raise WrongArgumentError(
            f"there is a process set of the ranks {ranks} already. Keep the object that "
            "add_process_set returned, or remove it first."
        )
    _agree("add_process_set", ranks)
    session().negotiator.add_group(groups.group(ranks))
    added.process_set_id = next(_set_numbers)
    _registered.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; False if it is not registered, or is that of all ranks.

    Collective. Raises NegotiationError if the ranks disagree.
    """
    if process_set not in _registered:
        return False
    ranks = list(process_set.members)
    _agree("remove_process_set", ranks)
    session().negotiator.remove_group(tuple(ranks))
    process_set.process_set_id = None
    _registered.remove(process_set)
    return True


def _agree(name: str, ranks: list[int]) -> None:
    """Return when every rank has called this function with the same ranks."""
    members = session().negotiator.world.ranks
    request = Request(name, "barrier", members, shapes=(tuple(ranks),), line=script_line())
    session().negotiator.submit(Task(request)).wait()


# ---------------------------------------------------------------------------- what is built in


def mpi_built() -> bool:
    """False: instep does not communicate by MPI (ranks may be started by mpirun)."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built


def gloo_built() -> bool:
    """True: CPU tensors are sent by Gloo."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """NCCL's version as one number, such as 22304; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version[0] * 10_000 + version[1] * 100 + version[2]


def cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built with ROCm."""
    return torch.version.hip is not None
