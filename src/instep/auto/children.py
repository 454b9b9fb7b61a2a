"""Processes that a script starts: once where that can be told, and never as ranks."""

from __future__ import annotations

import io
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from instep.auto import files
from instep.auto.relay import Relay
from instep.auto.shadow import Shadow
from instep.errors import UneditedError

T = TypeVar("T")
Function = Callable[..., Any]

_relay: list[Relay] = []
_handed_on: list[Function] = []


def begin(relay: Relay, see: Function) -> None:
    """Children are started once, and told through `relay`; spawned workers call `see(*folders)`."""
    _relay[:], _handed_on[:] = [relay], [see]


def end() -> None:
    """They are started wherever they are asked for."""
    _relay.clear()
    _handed_on.clear()


_HANDED_BACK = (None, subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT)


def run(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For subprocess.run and subprocess.call: rank 0 runs the child, all get what came of it.

    Unless the child reads or writes a file that this rank has open: then each rank runs its own.
    """
    command = kwargs["args"] if "args" in kwargs else args[0]
    streams = [kwargs.get(name) for name in ("stdin", "stdout", "stderr")]
    handed_back = all(isinstance(s, int | None) and s in _HANDED_BACK for s in streams)
    return _once(command, lambda: original(*args, **kwargs), here=not handed_back)


def system(original: Function, command: Any) -> Any:
    """For os.system."""
    return _once(command, lambda: original(command))


def popen(original: Function, cmd: Any, mode: str = "r", buffering: int = -1) -> Any:
    """For os.popen, if it is read from."""
    if mode != "r":
        return original(cmd, mode, buffering)

    def read() -> tuple[str, Any]:
        stream = original(cmd, mode, buffering)
        return stream.read(), stream.close()

    return _Popen(*_once(cmd, read))


def _once(command: Any, do: Callable[[], T], *, here: bool = False) -> T:
    """What `do` gives on rank 0, if the script itself asks for it; a library asks for itself."""
    text = repr(command)
    if here or not _relay or not _relay[0].reaches_here() or _asked_by_a_library():
        return do()
    role = files.role()
    if role is not None and role.mentions_temporary(text):
        return do()
    return _relay[0].once("a command", do, text, together=True)


_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def _asked_by_a_library() -> bool:
    """Whether installed code calls subprocess: it knows of several processes, or caches."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and file not in (subprocess.__file__, os.__file__):
            return file.startswith(_LIBRARIES)
        frame = frame.f_back
    return True


class _Popen(io.StringIO):
    """What os.popen returns, read already."""

    def __init__(self, text: str, code: Any) -> None:
        super().__init__(text)
        self._code = code

    def close(self) -> Any:
        """The child's exit status, as os.popen's result has it."""
        super().close()
        return self._code


# ---------------------------------------------------------------- processes of multiprocessing


def start_processes(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For torch.multiprocessing.spawn and start_processes."""
    raise UneditedError.own_processes("torch.multiprocessing.spawn")


_shared: list[bool] = []


def share_memory(original: Function, self: Any) -> Any:
    """For nn.Module.share_memory: processes of the script's own will train this model."""
    _shared.append(True)
    return original(self)


def start(original: Function, self: Any) -> Any:
    """For multiprocessing's Process.start: the child is no rank, whatever it does."""
    target = getattr(self, "_target", None)
    trains = _shared and not getattr(target, "__module__", "").startswith("torch.utils.data")
    if trains:
        raise UneditedError.own_processes("multiprocessing, on a model in shared memory")
    return original(self)


def preparation_data(original: Function, name: str) -> Any:
    """For multiprocessing.spawn: a spawned worker sees the files that its rank sees."""
    data = original(name)
    role = files.role()
    if not _handed_on or not isinstance(role, Shadow):
        return data
    return data | {"instep": _Sight([layer.folder for layer in role.layers])}


class _Sight:
    """On unpickling, a process sees the files through these layers."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def __reduce__(self) -> tuple[object, ...]:
        return _handed_on[0], tuple(self._folders)
