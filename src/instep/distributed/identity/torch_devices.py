"""This rank's accelerator, as torch knows it: by torch.accelerator, and its row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from instep.distributed.identity.accelerators import Accelerator, row_of
from instep.process import settings
from instep.process.torch_private.devices import (
    dispatch_key_for_device,
    has_kernel_for_dispatch_key,
    known_accelerator,
)
from instep.process.torch_private.distributed import device_types

CPU = torch.device("cpu")


def accelerator_type() -> str | None:
    """torch's name of the accelerator of this host; None where there is none that can be used.

    Nothing is initialized on it.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def current_row() -> Accelerator | None:
    """The row of the accelerator of this host."""
    name = accelerator_type()
    return None if name is None else row_of(name, is_rocm=torch.version.hip is not None)


def own_device() -> torch.device:
    """The device on which this rank computes: the current accelerator, or the CPU."""
    name = None if str(settings.DEVICE) == "cpu" else accelerator_type()
    return CPU if name is None else current_device(name)


def current_device(device_type: str) -> torch.device:
    """This rank's device of a type, with its index."""
    if device_type == accelerator_type():
        return torch.device(device_type, torch.accelerator.current_device_index())
    return torch.device(device_type, 0)


def control_device(group: torch.distributed.ProcessGroup | None = None) -> torch.device:
    """The device of small tensors for a process group; None is the default one."""
    types = device_types(group)
    return CPU if "cpu" in types else current_device(types[0])


def is_in_use() -> bool:
    """Whether this process has begun to use the accelerator, which is not to be begun by asking."""
    # What torch.accelerator.current_accelerator() asks, in a tenth of its time: it is asked in
    # every forward.
    found = known_accelerator()
    if found is None:
        return False
    is_initialized = getattr(_module(found.type), "is_initialized", None)
    return accelerator_type() is not None if is_initialized is None else bool(is_initialized())


def set_index(index: int | None) -> None:
    """Make a device the current one of this thread; a new thread has the first. None: nothing."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def index_in_use() -> int | None:
    """The index of the current accelerator, for `set_index` in another thread; None where none is
    in use."""
    return torch.accelerator.current_device_index() if is_in_use() else None


def generators(*, begin: bool = False) -> Sequence[torch.Generator]:
    """The global generators of the accelerators that this process sees, by index; none before the
    first use, unless `begin`, which uses the current one."""
    name = accelerator_type() if begin or is_in_use() else None
    if name is None:
        return ()
    if begin:
        torch.empty(0, device=name)
    module = _module(name)
    if hasattr(module, "_get_default_mps_generator"):
        return (module._get_default_mps_generator(),)
    return tuple(getattr(module, "default_generators", ()))


def own_generator(*, begin: bool = False) -> torch.Generator | None:
    """This rank's one of `generators`; None before the first use, unless `begin`."""
    found = generators(begin=begin)
    return found[torch.accelerator.current_device_index()] if found else None


def current_stream(device_type: str) -> Any:
    """The stream in which this thread queues work for devices of this type; None without any."""
    return torch.accelerator.current_stream() if has_streams(device_type) else None


def has_streams(device_type: str) -> bool:
    """Whether work for devices of this type is queued in streams."""
    row = current_row()
    return row is not None and row.name == device_type and row.has_streams


def in_stream(stream: Any) -> AbstractContextManager[object]:
    """Inside, this thread queues work in `stream`; with None, as before."""
    return nullcontext() if stream is None else stream


def is_capturing_graph() -> bool:
    """Whether a CUDA graph is captured in the current stream: nothing is computed before the graph
    is replayed, and nothing may be read back."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class StreamSet:
    """The streams in which work on the same memory was queued, for the one that needs all of it.

    Autograd computes each gradient in the stream of its forward, and a model may use several.
    """

    def __init__(self, device_type: str) -> None:
        self._streams: dict[Any, None] | None = {} if has_streams(device_type) else None

    def add(self) -> None:
        """The current stream of this thread has queued some."""
        if self._streams is not None:
            self._streams[torch.accelerator.current_stream()] = None

    def join(self) -> None:
        """Let the current stream wait for all others, on the device."""
        if self._streams:
            current = torch.accelerator.current_stream()
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            self._streams = {current: None}

    def clear(self) -> None:
        """Forget them."""
        if self._streams is not None:
            self._streams.clear()


def describe(index: int) -> tuple[str, str]:
    """The name of a device, and what tells it from all others of its host, if that is known."""
    name = accelerator_type() or ""
    module = _module(name)
    try:
        properties = module.get_device_properties(index)
    except (AttributeError, RuntimeError, NotImplementedError):
        return name, ""
    return str(getattr(properties, "name", name)), str(getattr(properties, "uuid", ""))


@cache
def has_kernel(operation: str, device_type: str) -> bool:
    """Whether a device of this type computes an operation of torch by itself."""
    key = dispatch_key_for_device(device_type)
    return has_kernel_for_dispatch_key(operation, key)


def _module(name: str) -> Any:
    return torch.get_device_module(name)
