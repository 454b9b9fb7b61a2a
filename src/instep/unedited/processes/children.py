"""Commands and other processes that a script starts: rank 0 starts a command once for all ranks."""

from __future__ import annotations

import hashlib
import multiprocessing.util
import os
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from instep.process import PACKAGE_FOLDER, frames_from, is_installed, is_stdlib
from instep.process.patching import Function
from instep.process.process_value import ProcessValue
from instep.process.torch_private.loaders import end_loader_workers
from instep.unedited.errors import UneditedError
from instep.unedited.files import os_functions
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.processes.command_files import CommandFiles, GenerationChange, file_identity
from instep.unedited.rank0_relay import Relay

T = TypeVar("T")

_OPERATION = "a command"
_END_SECONDS = 5.0


@dataclass(frozen=True)
class SharedCommands:
    """The commands that rank 0 starts for all ranks."""

    relay: Relay
    change: GenerationChange
    install_files: Function
    """Called in spawned workers, with the layers through which they see the files."""
    pids: set[int] = field(default_factory=set)
    """Process ids of those that run."""


_sharing = ProcessValue["SharedCommands | None"](None)


def set_sharing(sharing: SharedCommands | None) -> None:
    """Start commands on rank 0 only; None: on every rank that asks for them."""
    _sharing.value = sharing


@dataclass(frozen=True)
class SharedCommand:
    """A command that all ranks ask for and rank 0 starts."""

    relay: Relay
    text: str
    files: CommandFiles
    in_main: bool
    """Whether the ranks ask for it in their main threads."""

    def run(self, function: Callable[[], T]) -> T:
        """The value of `function()` on rank 0, which returns when the command has ended."""
        return self._run(function, self.files if self.in_main else None)

    def start(self, function: Callable[[], T]) -> T:
        """As `run`, for a function that only starts the command."""
        return self._run(function, None)

    def _run(self, function: Callable[[], T], sync: CommandFiles | None) -> T:
        return self.relay.run_on_rank0(
            _OPERATION, function, self.text, wait_first=self.in_main, sync=sync
        )


def shared_command(
    command: object, handles: Iterable[int] = (), directory: object = None
) -> SharedCommand | None:
    """This command, if all ranks ask for it; None if each rank runs its own.

    Each rank runs its own where ranks do different work, and if an installed library asks. Threads
    other than the main one have no common order, so there commands are matched by their texts.
    """
    sharing = _sharing.value
    if sharing is None or not sharing.relay.is_replicated() or _called_by_library():
        return None
    relay, change = sharing.relay, sharing.change
    in_main = relay.is_ordered()
    text = repr(command)
    if directory is not None:
        text += f" in {os.fspath(directory)!r}"  # type: ignore[call-overload]
    if not in_main:
        relay = relay.channel(f"command/{hashlib.sha256(text.encode()).hexdigest()}")
    names = text
    with suppress(FileNotFoundError):  # the current directory has been removed
        names += f" {os.getcwd()}"
    with bypass_overlay():
        files = CommandFiles(change, names, handles, new_generation=in_main)
    return SharedCommand(relay, text, files, in_main)


def run(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For subprocess.run and subprocess.call."""
    command = kwargs["args"] if "args" in kwargs else args[0]
    handles = file_handles(kwargs)
    shared = shared_command(command, handles, kwargs.get("cwd"))
    if shared is None:
        return original(*args, **kwargs)

    def run_original() -> tuple[int, Any, Any] | int:
        check_handles(handles)
        result = original(*args, **with_rank0_pipes(kwargs))
        if isinstance(result, subprocess.CompletedProcess):
            return result.returncode, result.stdout, result.stderr
        return int(result)

    result = shared.run(run_original)
    if isinstance(result, int):
        return result
    code, *outputs = result
    return subprocess.CompletedProcess(command, code, *map(shared.files.with_own_names, outputs))


def system(original: Function, command: Any) -> Any:
    """For os.system."""
    shared = shared_command(command)
    return original(command) if shared is None else shared.run(lambda: original(command))


def spawn_at_terminal(original: Function, argv: Any, *args: Any, **kwargs: Any) -> Any:
    """For pty.spawn."""
    shared = shared_command(argv)
    run_original = partial(original, argv, *args, **kwargs)
    return run_original() if shared is None else shared.run(run_original)


# --------------------------------------------------------------- commands with a process id


def spawn(original: Function, mode: int, file: Any, args: Any, *env: Any, **kwargs: Any) -> Any:
    """For os.spawnv and so on."""
    shared = shared_command(args)
    start = partial(original, mode, file, args, *env, **kwargs)
    if shared is None:
        return start()
    return shared.run(start) if mode == os.P_WAIT else add_pid(shared.start(start))


def posix_spawn(original: Function, path: Any, argv: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.posix_spawn and os.posix_spawnp."""
    shared = shared_command(argv)
    start = partial(original, path, argv, *args, **kwargs)
    return start() if shared is None else add_pid(shared.start(start))


def add_pid(pid: int) -> int:
    """Remember that rank 0 has started this process for all ranks."""
    if _sharing.value is not None:
        _sharing.value.pids.add(pid)
    return pid


def remove_pid(pid: int) -> None:
    """Forget a process that has ended: its id may become that of another one."""
    if _sharing.value is not None:
        _sharing.value.pids.discard(pid)


def _is_shared(pid: int) -> bool:
    return _sharing.value is not None and pid in _sharing.value.pids


def waitpid(original: Function, pid: int, options: int) -> Any:
    """For os.waitpid."""
    shared = shared_command(f"waiting for {pid}") if _is_shared(pid) else None
    if shared is None:
        return original(pid, options)
    ended, status = shared.run(partial(original, pid, options))
    if ended:
        remove_pid(pid)
    return ended, status


def kill(original: Function, pid: int, signal: int) -> Any:
    """For os.kill and os.killpg."""
    shared = shared_command(f"a signal to {pid}") if _is_shared(pid) else None
    return original(pid, signal) if shared is None else shared.start(lambda: original(pid, signal))


def start_asyncio_command(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """For the method with which asyncio starts commands."""
    if shared_command("asyncio") is not None:
        raise UneditedError(
            "this script starts commands by asyncio, which several ranks cannot share. Use "
            "subprocess.run or Popen; or run this script with one rank (-n 1), or with --plain."
        )
    return original(self, *args, **kwargs)


# ------------------------------------------------------------------ the arguments of a command


def file_handles(kwargs: dict[str, Any]) -> list[int]:
    """The descriptors of the script's own files that a command is given."""
    streams = [kwargs.get(name) for name in ("stdin", "stdout", "stderr")]
    given = [stream for stream in streams if stream is not None and pipe_end(stream) is None]
    numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in given]
    return [*(number for number in numbers if number >= 0), *kwargs.get("pass_fds", ())]


class PipeEnd:
    """One end of a pipe to a command that rank 0 has started."""

    fd: int
    """The descriptor on rank 0."""


def pipe_end(stream: Any) -> PipeEnd | None:
    """The pipe of another command that the script passes on, as in `Popen(stdin=other.stdout)`."""
    raw = getattr(getattr(stream, "buffer", stream), "raw", stream)
    return raw if isinstance(raw, PipeEnd) else None


def with_rank0_pipes(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command, with rank 0's descriptors in place of other commands' pipes."""
    return {
        name: value if (pipe := pipe_end(value)) is None else pipe.fd
        for name, value in kwargs.items()
    }


def check_handles(handles: Iterable[int]) -> None:
    """Raise UneditedError if one of these files is a pipe or socket of the script's own."""
    standard = [file_identity(fd) for fd in range(3)]
    for fd in handles:
        mode = os.fstat(fd).st_mode
        if (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and file_identity(fd) not in standard:
            raise UneditedError(
                f"this script gives a command a pipe or a socket of its own (file descriptor "
                f"{fd}). Only rank 0 starts the command, so the other ranks would read nothing "
                "from it. Use subprocess.PIPE or a file; or run this script with one rank (-n 1), "
                "or with --plain."
            )


# --------------------------------------------------------------------------------- the caller


def _called_by_library() -> bool:
    """Whether installed code starts a command: it handles several processes itself, or caches.

    Python's own modules (os, pty, shutil, concurrent.futures) start commands for their callers.
    """
    for frame in frames_from(sys._getframe(2)):
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE_FOLDER) and not is_stdlib(file):
            return is_installed(file)
    return False


# ---------------------------------------------------------------- processes of multiprocessing


def start_processes(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For torch.multiprocessing.spawn and start_processes."""
    raise _starts_training_processes("torch.multiprocessing.spawn")


def launch(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For what starts the processes of `accelerate launch` and of torchrun."""
    how = "accelerate launch" if original.__module__.startswith("accelerate.") else "torchrun"
    raise UneditedError(
        f"{how} starts training processes of its own; on several ranks each would start them all. "
        "Let `instep run -n N train.py` start the script itself."
    )


_shares_modules: list[bool] = []


def share_memory(original: Function, self: Any) -> Any:
    """For nn.Module.share_memory: processes of the script's own will train this model."""
    _shares_modules.append(True)
    return original(self)


def start(original: Function, self: Any) -> Any:
    """For multiprocessing's Process.start, unless the process is to train a model."""
    target = getattr(self, "_target", None)
    if _shares_modules and not getattr(target, "__module__", "").startswith("torch.utils.data"):
        raise _starts_training_processes("multiprocessing, on a model in shared memory")
    return original(self)


def end_processes() -> None:
    """End what this rank has started by multiprocessing, and do what that does at Python's end: it
    ends pools, and in the end removes temporary folders. Waits no longer than `_END_SECONDS`."""
    # A queue waits until a process has read it, and a pool until its processes let go of a lock.
    ending = threading.Thread(target=_run_exit_functions, daemon=True)
    ending.start()
    ending.join(_END_SECONDS)
    _kill_processes()


def _run_exit_functions() -> None:
    end_loader_workers()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    _kill_processes()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def _kill_processes() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _starts_training_processes(how: str) -> UneditedError:
    return UneditedError(
        f"this script starts training processes of its own ({how}); on several ranks each "
        "would start them all. Run it with one rank (-n 1), or let the script call the function "
        "itself, once: `instep run -n N` starts the processes."
    )


def spawn_data(original: Function, name: str) -> Any:
    """For multiprocessing.spawn: a spawned worker sees the files that its rank sees."""
    data = original(name)
    layers = os_functions.current_files().layers
    is_shared = _sharing.value is not None and layers
    return data | {"instep": _InstallFiles(layers)} if is_shared else data


class _InstallFiles:
    """Unpickling it lets a process see the files through these layers."""

    def __init__(self, layers: Iterable[object]) -> None:
        self._layers = tuple(layers)

    def __reduce__(self) -> tuple[object, ...]:
        assert _sharing.value is not None
        return _sharing.value.install_files, self._layers
