"""Processes that a script starts: once where that can be told, and never as ranks."""

from __future__ import annotations

import hashlib
import os
import site
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from instep.process import PACKAGE_FOLDER
from instep.unedited.errors import UneditedError
from instep.unedited.files import os_functions
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.processes.rebasing import Command, Rebasing
from instep.unedited.rank0_relay import Relay

T = TypeVar("T")
Function = Callable[..., Any]

KIND = "a command"


@dataclass(frozen=True)
class Means:
    """What is needed to start commands once."""

    relay: Relay
    rebasing: Rebasing
    see: Function
    """For spawned workers: see the files through these layers."""


_means: list[Means] = []
_started: set[int] = set()
"""Process ids of commands that rank 0 has started for all."""


def begin(relay: Relay, rebasing: Rebasing, see: Function) -> None:
    """Commands are started once, and told through `relay`; spawned workers call `see(*layers)`."""
    _means[:] = [Means(relay, rebasing, see)]


def end() -> None:
    """They are started wherever they are asked for."""
    _means.clear()
    _started.clear()


@dataclass(frozen=True)
class Asked:
    """A command that the script itself asks for, on all ranks."""

    relay: Relay
    text: str
    command: Command
    in_main: bool

    def once(self, do: Callable[[], T]) -> T:
        """What `do` gives on rank 0, when the command has ended."""
        moment = self.command if self.in_main else None
        return self.relay.once(KIND, do, self.text, together=self.in_main, moment=moment)

    def begun(self, do: Callable[[], T]) -> T:
        """The same, where the command is only begun by then."""
        return self.relay.once(KIND, do, self.text, together=self.in_main)


def asked(command: object, handles: Iterable[int] = (), folder: object = None) -> Asked | None:
    """This command, if the script asks for it on all ranks.

    None where each rank runs its own: where ranks do different work, and in libraries.
    Other threads have no common order: there, commands are known by what they are.
    """
    if not _means or not _means[0].relay.is_of_this_process() or _asked_by_a_library():
        return None
    relay, rebasing = _means[0].relay, _means[0].rebasing
    in_main = relay.reaches_here()
    text = repr(command) if folder is None else f"{command!r} in {os.fspath(folder)!r}"  # type: ignore[call-overload]
    if not in_main:
        relay = relay.lane(f"command/{hashlib.sha256(text.encode()).hexdigest()}")
    with bypass_overlay():
        named = Command(rebasing, f"{text} {os.getcwd()}", handles, rebases=in_main)
    return Asked(relay, text, named, in_main)


def run(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For subprocess.run and subprocess.call: rank 0 runs the command, all get what came of it."""
    command = kwargs["args"] if "args" in kwargs else args[0]
    given = handles(kwargs)
    this = asked(command, given, kwargs.get("cwd"))
    if this is None:
        return original(*args, **kwargs)

    def do() -> tuple[int, Any, Any] | int:
        refuse_pipes(given)
        done = original(*args, **on_rank_0(kwargs))
        if isinstance(done, subprocess.CompletedProcess):
            return done.returncode, done.stdout, done.stderr
        return int(done)

    done = this.once(do)
    if isinstance(done, int):
        return done
    code, *texts = done
    return subprocess.CompletedProcess(command, code, *map(this.command.as_seen_here, texts))


def system(original: Function, command: Any) -> Any:
    """For os.system."""
    this = asked(command)
    return original(command) if this is None else this.once(lambda: original(command))


def interact(original: Function, argv: Any, *args: Any, **kwargs: Any) -> Any:
    """For pty.spawn."""
    this = asked(argv)
    start = partial(original, argv, *args, **kwargs)
    return start() if this is None else this.once(start)


# -------------------------------------------------------------------- known by their process ids


def spawn(original: Function, mode: int, file: Any, args: Any, *env: Any) -> Any:
    """For os.spawnv and its like."""
    this = asked(args)
    start = partial(original, mode, file, args, *env)
    if this is None:
        return start()
    return this.once(start) if mode == os.P_WAIT else known(this.begun(start))


def posix_spawn(original: Function, path: Any, argv: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.posix_spawn and os.posix_spawnp."""
    this = asked(argv)
    start = partial(original, path, argv, *args, **kwargs)
    return start() if this is None else known(this.begun(start))


def known(pid: int) -> int:
    """Rank 0 has started this process for all."""
    _started.add(pid)
    return pid


def over(pid: int) -> None:
    """This process has ended: its id may be another one's next."""
    _started.discard(pid)


def waitpid(original: Function, pid: int, options: int) -> Any:
    """For os.waitpid."""
    this = asked(f"waiting for {pid}") if pid in _started else None
    if this is None:
        return original(pid, options)
    ended, status = this.once(partial(original, pid, options))
    if ended:
        over(pid)
    return ended, status


def kill(original: Function, pid: int, signal: int) -> Any:
    """For os.kill and os.killpg."""
    this = asked(f"a signal to {pid}") if pid in _started else None
    return original(pid, signal) if this is None else this.begun(lambda: original(pid, signal))


def asyncio_start(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """For what asyncio starts commands by."""
    if asked("asyncio") is not None:
        raise UneditedError.asyncio_commands()
    return original(self, *args, **kwargs)


# ------------------------------------------------------------------------ what a command is given


def handles(kwargs: dict[str, Any]) -> list[int]:
    """The script's own files that a command gets."""
    streams = [kwargs.get(name) for name in ("stdin", "stdout", "stderr")]
    given = [stream for stream in streams if stream is not None and pipe_of(stream) is None]
    numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in given]
    return [*(number for number in numbers if number >= 0), *kwargs.get("pass_fds", ())]


def pipe_of(stream: Any) -> Any:
    """The pipe of another command that the script passes on, as `Popen(stdin=other.stdout)`."""
    raw = getattr(getattr(stream, "buffer", stream), "raw", stream)
    return raw if isinstance(raw, PipeEnd) else None


class PipeEnd:
    """One end of a pipe to a command that rank 0 has started."""

    fd: int
    """Rank 0's file descriptor."""


def on_rank_0(kwargs: dict[str, Any]) -> dict[str, Any]:
    """These arguments, with the pipes of other commands as what rank 0 has."""
    return {
        name: value if (pipe := pipe_of(value)) is None else pipe.fd
        for name, value in kwargs.items()
    }


def refuse_pipes(given: Iterable[int]) -> None:
    """Raise UneditedError where one of these files is a pipe or socket of the script's own."""
    standard = [_file(fd) for fd in range(3)]
    for fd in given:
        kind = os.fstat(fd).st_mode
        if (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)) and _file(fd) not in standard:
            raise UneditedError.pipe_to_command(fd)


def _file(fd: int) -> tuple[int, int] | None:
    try:
        seen = os.fstat(fd)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


# ------------------------------------------------------------------------------- who asks

_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
        site.getusersitepackages(),
    )
)


def _asked_by_a_library() -> bool:
    """Whether installed code starts a command: it knows of several processes, or caches.

    Python's own modules (os, pty, shutil, concurrent.futures) start what they are told to.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE_FOLDER, "<frozen ")):
            if file.startswith(_INSTALLED):
                return True
            if not file.startswith(_STANDARD):
                return False
        frame = frame.f_back
    return False


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
    role = os_functions.role()
    if not _means or not isinstance(role, OverlayFiles):
        return data
    return data | {"instep": _Sight(role.layers)}


class _Sight:
    """On unpickling, a process sees the files through these layers."""

    def __init__(self, layers: Iterable[object]) -> None:
        self._layers = tuple(layers)

    def __reduce__(self) -> tuple[object, ...]:
        return _means[0].see, self._layers
