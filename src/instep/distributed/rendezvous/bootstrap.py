"""From a World to a process group, and out of it again: `current`, `init`, `leave`.

The process group is torch.distributed's: NCCL between GPUs, the backend of their row between
other accelerators (`identity/accelerators.py`), Gloo between CPUs. A world of one needs none.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# Imported later, its default arguments capture the process group, which then outlives its
# destruction; a Gloo thread that lets a tensor go while Python ends aborts the process.
import torch.distributed.nn.functional

from instep.distributed import gloo_threads, interfaces, shm
from instep.distributed.errors import RendezvousError
from instep.distributed.file_limit import allow_open_files, check_file_size
from instep.distributed.flight_record import timeline_file
from instep.distributed.gloo_connections import connect_when_used
from instep.distributed.identity import launchers
from instep.distributed.identity.accelerators import row_of
from instep.distributed.identity.authentication import make_secret
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import (
    group_states,
    job_fingerprint,
    join_check,
    listening,
    port_file,
)
from instep.distributed.rendezvous.devices import (
    backend_of,
    check_devices_differ,
    device_name,
    take_device,
)
from instep.distributed.rendezvous.stores import has_agent_store, open_store, store_host
from instep.distributed.rendezvous.verified_store import VerifiedStore
from instep.distributed.watchdog import client
from instep.process import malloc, print_line, settings
from instep.process.errors import LaunchVariablesError
from instep.process.process_value import ProcessValue
from instep.process.torch_private.distributed import process_groups

_FILES, _FILES_PER_RANK = 512, 4
"""Files that a rank may open: its own, and connections to the others. Gloo has one for each other
rank in each group; rank 0 has one for each in its store, and in Horovod's coordinator. Its watcher
is started with the same limit."""
_worlds_of_one: list[World] = []
"""Those of `world_of_one` that this process is in now, the innermost last."""
_joined = ProcessValue[World | None](None)
"""The world that `init` has joined: the launcher's variables need not be there any more."""
_is_alone = ProcessValue(False)
"""Whether `init` has found a world of one."""
_watched = ProcessValue[weakref.ref[dist.ProcessGroup] | None](None)
"""The last process group in which this rank is watched."""
_P2P_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Without it torch warns at a rank's first message that messages keep the order of all else that it
sends by NCCL. `instep.send` means that."""
_is_making_group = ProcessValue(False)
"""Whether `init` makes the process group of torch."""


def current() -> World:
    """The world of this process now. No side effects.

    A process group that exists comes before the launcher's variables.
    Raises LaunchVariablesError when these are half set or contradictory.
    """
    if _worlds_of_one:
        return _worlds_of_one[-1]
    if not dist.is_initialized():
        return launchers.detect()
    rank, size = dist.get_rank(), dist.get_world_size()
    joined = _joined.value
    if joined is not None and (joined.rank, joined.size) == (rank, size):
        return joined
    try:
        world = launchers.detect()
    except LaunchVariablesError:
        world = World()
    if (world.rank, world.size) == (rank, size):
        return world
    return World(rank=rank, size=size, local_rank=rank, local_size=size, source="torch.distributed")


def init(
    method: str | dist.Store | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | None = None,
) -> World:
    """Join the other ranks; does nothing when they have joined, or in a world of one.

    Everything in instep that needs the other ranks calls this by itself; call it for a rendezvous
    of your own. On one host nothing listens beyond the loopback interface (except where torchrun
    hosts the store); on several, Gloo, NCCL and HCCL take the interface that leads to the master
    (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and HCCL_SOCKET_IFNAME are set where the user has not).
    With accelerators, the rank's own device becomes the current one; without, this process keeps
    memory that it has freed (up to 1 GiB, of which the first 512 MiB in huge pages), unless
    GLIBC_TUNABLES or one of MALLOC_MMAP_MAX_, MALLOC_MMAP_THRESHOLD_, MALLOC_TOP_PAD_ and
    MALLOC_TRIM_THRESHOLD_ is set.

    Args:
        method: `env://`, `tcp://host:port`, `file://path` or a Store; by default what the
            launcher's variables say.
        rank, world_size: both, or by default the launcher's.
        timeout: how long the ranks wait for each other, here and in collectives; by default
            INSTEP_TIMEOUT seconds.

    Returns:
        This process's place in the job, as `instep.world`.

    Collective. Raises MixedJobError where the ranks are not of one job, PortInUseError,
    LeftoverRendezvousError, RendezvousError, AuthenticationError, BackendError, DeviceError or
    LaunchVariablesError.
    """
    world = _init(method, rank, world_size, timeout)
    _mention_unused_checkpoint()
    return world


@functools.cache
def _mention_unused_checkpoint() -> None:
    """Print one line if a folder for checkpoints is given to a script that instep has not started.
    Under `instep run` or `python -m instep` such a script is refused."""
    if str(settings.CHECKPOINT) and not job_fingerprint.is_announced() and current().rank == 0:
        print_line(
            f"{settings.CHECKPOINT.name} is not used here: it is for unedited scripts. Let this "
            "script, which calls instep itself, save with instep.Checkpoint."
        )


def init_with_prefix(prefix: str) -> World:
    """As `init`, with a prefix for its keys in the store, where the script may make a process group
    of its own later."""
    return _init(None, None, None, None, prefix)


def _init(
    method: str | dist.Store | None,
    rank: int | None,
    world_size: int | None,
    timeout: timedelta | None,
    prefix: str = "",
) -> World:
    if dist.is_initialized() or _worlds_of_one:
        return current()
    settings.check_variables()
    world = _requested_world(rank, world_size)
    if world.size == 1:
        _is_alone.value = True
        return world
    timeout = timeout or settings.timeout()
    check_file_size()
    allow_open_files(_FILES + _FILES_PER_RANK * world.size)
    connect_when_used(world.size)
    timeline_file.create(world.local_rank, world.node_rank)
    device = take_device(world)
    if device.type == "cpu":
        malloc.keep_freed_memory()
    backend = _backend(world, device)
    joined = open_store(method, world, timeout)
    _export_interface(joined.interface)
    if device.type == "cuda":
        os.environ.setdefault(_P2P_WARNING, "false")
    bare = dist.PrefixStore(prefix, joined.store) if prefix else joined.store
    keeper = None if isinstance(method, dist.Store) or has_agent_store() else 0
    store = bare if joined.key is None else VerifiedStore(bare, joined.key, keeper=keeper)
    one_host = joined.interface == interfaces.LOOPBACK
    listen = partial(_listener, store, one_host)
    client.start_watcher(world, store, joined.key, listen, store_host(store))
    if device.type != "cpu":
        check_devices_differ(store, world, device_name(device), row_of(device.type).title)
    # NCCL's threads read the store once a second as long as the job lasts: not through Python.
    store_of_torch = bare if device.type != "cpu" else store
    with _is_making_group.set_to(True):
        dist.init_process_group(
            backend,
            store=store_of_torch,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
        )
    group_states.add(joined.key, one_host, store_of_torch, timeout)
    _joined.value = world
    timeline_file.start(world.rank, world.node_rank)
    gloo_threads.wait_at_exit()
    atexit.unregister(leave)  # of an earlier group
    atexit.register(leave)
    _remember_watched()
    return world


def _requested_world(rank: int | None, world_size: int | None) -> World:
    if rank is None and world_size is None:
        return launchers.detect()
    if rank is None or world_size is None:
        raise RendezvousError("give both rank and world_size, or neither.")
    one_host = {"local_rank": rank, "local_size": world_size}
    return World(rank=rank, size=world_size, **one_host, source=join_check.BY_THE_SCRIPT)


def _backend(world: World, device: torch.device) -> str:
    """The backend of the process group, as torch names it."""
    requested = str(settings.BACKEND)
    if device.type != "cpu":
        return f"cpu:gloo,{device.type}:{backend_of(device)}"
    if requested == "gloo" or (requested == "auto" and world.one_host and shm.obstacle()):
        return "gloo"
    return shm.NAME  # between hosts, which may differ, the ranks agree on what they can do


def _export_interface(name: str | None) -> None:
    """Gloo, NCCL and HCCL read it from the environment only; a variable that is set stays."""
    if name is not None:
        for variable in interfaces.IFNAME_VARIABLES:
            os.environ.setdefault(variable, name)


def ensure_init() -> None:
    """Call `init` unless there is a process group; let a group that the script made be watched."""
    if dist.group.WORLD is None:  # dist.is_initialized looks for who asks
        if not (_is_alone.value and launchers.detect().size == 1):
            init()
    else:
        watch_group()


def watch_group() -> None:
    """Let a process group that the script made be watched, if it is not yet. Collective."""
    watched = _watched.value
    if _is_making_group.value or (watched is not None and watched() is dist.group.WORLD):
        return
    _remember_watched()
    _mention_unused_checkpoint()
    world = current()
    if world.size > 1:
        client.start_watcher(world, store(), key(), listener, store_host(store()))


def _remember_watched() -> None:
    assert dist.group.WORLD is not None
    _watched.value = weakref.ref(dist.group.WORLD)


def leave() -> None:
    """Destroy the process group; does nothing where there is none."""
    _joined.value = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _stay_out_of_groups() -> None:
    """In a forked child, which has no part in the groups and none of Gloo's threads: to destroy a
    group, as Python does at its end, would wait for them for ever."""
    atexit.unregister(leave)
    for group in process_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_stay_out_of_groups)


def own_group() -> dist.ProcessGroup | None:
    """The process group of torch, if `init` has made it."""
    state = group_states.find()
    return None if state is None or state.timeout is None else dist.group.WORLD


def default_timeout() -> timedelta | None:
    """The limit of a group's collectives where the script gives none: that of the group which
    `init` has made, or INSTEP_TIMEOUT where it is set. None: as torch chooses."""
    state = group_states.find()
    if state is not None and state.timeout is not None:
        return state.timeout
    return settings.timeout() if os.environ.get(settings.TIMEOUT.name) else None


@contextmanager
def world_of_one(source: str) -> Iterator[None]:
    """Let this process be a world of one for a while; `source` is the reason, for messages."""
    _worlds_of_one.append(World(source=source))
    try:
        yield
    finally:
        _worlds_of_one.pop()


def is_world_of_one() -> bool:
    """Whether this process is in a `world_of_one`."""
    return bool(_worlds_of_one)


# --------------------------------------------------------- the store and the key of a group


_OWN_KEY = make_secret()


def store() -> dist.Store:
    """The store of the default process group; its values are verified.

    Collective the first time in a group that the script made, as `key`.
    """
    return _group_state().store


def key() -> bytes:
    """The key that signs messages of the default process group: only its ranks know it. In a world
    of one it is this process's own.

    Collective the first time in a group that the script made. Raises AuthenticationError
    where not all of its ranks were given the same secret.
    """
    return _group_state().key if dist.is_initialized() else _OWN_KEY


def listener() -> tuple[socket.socket, str]:
    """On rank 0, a new listening socket for the other ranks, and the name of its host for them: on
    the loopback interface where they share it, else at the address where they have joined."""
    return _listener(store(), _group_state().one_host)


def _listener(store: dist.Store, one_host: bool) -> tuple[socket.socket, str]:
    host = port_file.LOOPBACK_HOST if one_host else store_host(store) or socket.gethostname()
    return listening.listen_on_free_port(host), host


def _group_state() -> group_states.GroupState:
    return group_states.find() or group_states.add_of_script(one_host=current().one_host)
