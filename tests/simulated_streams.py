"""Streams of the simulated accelerator: every access to memory must have an order.

An operation may touch memory only if whatever another stream did there before has certainly ended:
through an event, a wait for a stream or for a collective, or a wait of the host. Otherwise a real
device may compute them in any order, and a Race is raised, which names both. Nothing depends on
which stream was faster, so one run finds it. simulated_streams.cpp knows who has waited for whom.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OF_GROUPS = range(32, 96)
"""The streams of groups of ranks, by turns."""
_SOURCE = Path(__file__).with_suffix(".cpp")


class Race(RuntimeError):  # noqa: N818  # it is what it is called
    """Two streams use the same memory, and nothing says which of them comes first."""


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    stream: int
    number: int
    """Of the operation, in its stream."""
    is_write: bool
    operation: str


class Streams:
    """The streams of this process, and what they have done to memory that is in use."""

    def __init__(self, library: ctypes.PyDLL, describe: Callable[[str], str]) -> None:
        """`describe`: an operation and the line from which it comes."""
        self._library = library
        self._describe = describe
        self._accesses: dict[int, list[_Access]] = {}
        """By the address of a storage."""

    @property
    def device(self) -> int:
        """The index of this thread's current device."""
        return int(self._library.sim_device())

    @property
    def current(self) -> int:
        return int(self._library.sim_stream())

    def forget(self, address: int) -> None:
        """There is new memory at this address."""
        self._accesses.pop(address, None)

    def touch(
        self,
        operation: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        stream: int | None = None,
    ) -> int:
        """Start an operation on these tensors, in the current stream; returns its number there.

        Raises Race.
        """
        stream = self.current if stream is None else stream
        number = int(self._library.sim_begin(stream))
        found = [(tensor, True) for tensor in writes]
        written = {id(tensor) for tensor, _ in found}
        found += [(tensor, False) for tensor in reads if id(tensor) not in written]
        for tensor, is_write in found:
            if tensor.numel():
                self._touch(tensor, is_write, stream, number, operation)
        return number

    def has_happened(self, stream: int, number: int) -> bool:
        """Whether the host knows that an operation has ended."""
        return bool(self._library.sim_has_ended(-1, stream, number))

    def _has_ended(self, stream: int, each: _Access) -> bool:
        return bool(self._library.sim_has_ended(stream, each.stream, each.number))

    def _touch(
        self, tensor: Tensor, is_write: bool, stream: int, number: int, operation: str
    ) -> None:
        start, stop = _extent(tensor)
        earlier = self._accesses.setdefault(tensor.untyped_storage().data_ptr(), [])
        kept = []
        for each in earlier:
            has_ended = each.stream == stream or self._has_ended(stream, each)
            is_shared = each.start < stop and start < each.stop
            if is_shared and (is_write or each.is_write) and not has_ended:
                verbs = ["reads", "writes"]
                raise Race(
                    f"stream {stream} {verbs[is_write]} in {self._describe(operation)} what stream "
                    f"{each.stream} {verbs[each.is_write]} in {each.operation}, and has not waited"
                )
            is_covered = start <= each.start and each.stop <= stop
            if not (is_covered and has_ended and (is_write or not each.is_write)):
                kept.append(each)
        kept.append(_Access(start, stop, stream, number, is_write, self._describe(operation)))
        earlier[:] = kept


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements are."""
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    first = tensor.storage_offset()
    size = tensor.element_size()
    return first * size, (first + last + 1) * size


def stream_of_group(key: str, number: int) -> torch.Stream:
    """The stream in which a group's collectives run."""
    kind: Any = getattr(torch._C._autograd.DeviceType, key).value
    identity = OF_GROUPS[number % len(OF_GROUPS)]
    index = torch.accelerator.current_device_index()
    return torch.Stream(stream_id=identity, device_index=index, device_type=kind)


def load(
    key: str, devices: int, on_host_waits: Callable[[], None], describe: Callable[[str], str]
) -> Streams:
    """Bring streams and events to torch, for the rest of this process. Compiles the source once.

    `key` is the device's dispatch key, `devices` how many there are. `on_host_waits` is called
    whenever the host waits for a stream, an event or the device.
    """
    library = ctypes.PyDLL(str(_compiled(key)))
    library.sim_set_devices(devices)
    library.sim_stream.restype = ctypes.c_int64
    library.sim_begin.argtypes, library.sim_begin.restype = (ctypes.c_int64,), ctypes.c_uint64
    library.sim_has_ended.argtypes = ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64
    library.sim_has_ended.restype = ctypes.c_bool
    callback = ctypes.CFUNCTYPE(None)(on_host_waits)
    library.sim_on_host_waits(callback)
    streams = Streams(library, describe)
    streams.callback = callback  # type: ignore[attr-defined]  # as long as the library calls it
    return streams


def _compiled(key: str) -> Path:
    folder = Path(torch.__file__).parent
    text = _SOURCE.read_text() + torch.__version__ + str(folder) + key
    name = f"{_SOURCE.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    path = _SOURCE.parents[1] / "build" / "simulated" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            made = Path(own, name)
            subprocess.run(
                ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}",
                 f"-DSIM_KEY={key}", f"-DSIM_IS_{key}", "-o", made, _SOURCE,
                 f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"],
                check=True,
            )  # fmt: skip
            made.replace(path)
    return path
