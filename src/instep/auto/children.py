"""Processes that a script starts: once where that can be told, and never as ranks."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable
from typing import Any

from instep.auto import files
from instep.auto.overlay import Shadow
from instep.auto.relay import Relay
from instep.errors import UneditedError

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


_OURS = (None, subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT)


def run(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For subprocess.run and subprocess.call: rank 0 runs the child, all get what came of it.

    Unless the child writes into a file that this rank has open: then each rank runs its own.
    """
    streams = [kwargs.get(name) for name in ("stdin", "stdout", "stderr")]
    if not _is_told() or any(not isinstance(s, int | None) or s not in _OURS for s in streams):
        return original(*args, **kwargs)
    what = kwargs["args"] if "args" in kwargs else args[0]
    return _relay[0].once(f"the command {what!r}", lambda: original(*args, **kwargs))


def system(original: Function, command: Any) -> Any:
    """For os.system."""
    if not _is_told():
        return original(command)
    return _relay[0].once(f"the command {command!r}", lambda: original(command))


def popen(original: Function, cmd: Any, mode: str = "r", buffering: int = -1) -> Any:
    """For os.popen, if it is read from."""
    if not _is_told() or mode != "r":
        return original(cmd, mode, buffering)

    def read() -> tuple[str, Any]:
        stream = original(cmd, mode, buffering)
        return stream.read(), stream.close()

    return _Popen(*_relay[0].once(f"the command {cmd!r}", read))


class _Popen(io.StringIO):
    """What os.popen returns, read already."""

    def __init__(self, text: str, code: Any) -> None:
        super().__init__(text)
        self._code = code

    def close(self) -> Any:
        """The child's exit status, as os.popen's result has it."""
        super().close()
        return self._code


def _is_told() -> bool:
    return bool(_relay) and _relay[0].reaches_here()


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
