"""subprocess.Popen: rank 0 has the process, and every rank an object that behaves like it.

Results that depend on time (how much a read returns, whether the process still runs) come from
rank 0 at each call, so that all ranks take the same path.
"""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from instep.process.patching import Function, replaced
from instep.unedited.errors import UneditedError
from instep.unedited.processes import children
from instep.unedited.processes.command_files import CommandFiles
from instep.unedited.rank0_relay import Relay

T = TypeVar("T")

_NAMES = ("stdin", "stdout", "stderr")
_signature = inspect.signature(subprocess.Popen.__init__)
_read, _write = os.read, os.write


class SharedProcess:
    """Held by a Popen object whose process rank 0 has started for all ranks."""

    def __init__(self, relay: Relay, name: str, files: CommandFiles) -> None:
        self._relay, self._name = relay, name
        self.files = files
        self.rank0_streams: tuple[Any, ...] = (None, None, None)
        """On rank 0, the streams that Popen has made."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which has the process."""
        return self._relay.is_rank0

    def run_on_rank0(
        self, name: str, function: Callable[[], T], *, may_end: bool = True, stream: str = ""
    ) -> T:
        """The value of `function()` on rank 0; `may_end`: the process may have ended by then."""
        if not self._relay.is_replicated():
            if self._relay.is_rank0:
                return function()
            raise UneditedError(
                "only rank 0 has this command, and it is used where the ranks do different work "
                "(in a module's forward, a data loader or a forked process). Start it there, too; "
                "or run this script with one rank (-n 1), or with --plain."
            )
        sync = self.files if may_end and self._relay.is_ordered() else None
        return self._relay.channel(f"{self._name}/{stream}").run_on_rank0(name, function, sync=sync)


def init(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """For Popen.__init__."""
    given: dict[str, Any] = _signature.bind(self, *args, **kwargs).arguments
    del given["self"]
    handles = children.file_handles(given)
    shared = children.shared_command(given["args"], handles, given.get("cwd"))
    if shared is None:
        original(self, *args, **kwargs)
        return

    def start() -> tuple[int, int]:
        children.check_handles(handles)
        original(self, **children.with_rank0_pipes(given))
        return self.pid, next(_numbers)

    pid, number = shared.start(start)
    self._shared_process = SharedProcess(shared.relay, f"popen{number}", shared.files)
    if self._shared_process.is_rank0:
        self._shared_process.rank0_streams = self.stdin, self.stdout, self.stderr
    else:
        _init_without_child(self, given, pid)
    children.add_pid(pid)
    _set_streams(self, given)


_numbers = iter(range(1 << 62))


def _init_without_child(self: Any, given: dict[str, Any], pid: int) -> None:
    """Set the attributes that Popen's methods use, in a process that has no child."""
    self.args, self.pid, self.returncode = given["args"], pid, None
    self.encoding, self.errors = given.get("encoding"), given.get("errors")
    self.pipesize = given.get("pipesize", -1)
    self.process_group = given.get("process_group", -1)
    self.text_mode = any(map(given.get, ("encoding", "errors", "text", "universal_newlines")))
    self._input, self._communication_started = None, False
    self._closed_child_pipe_fds, self._sigint_wait_secs = True, 0
    self._waitpid_lock = threading.Lock()


def _set_streams(self: Any, given: dict[str, Any]) -> None:
    size = given.get("bufsize", -1)
    for name, stream in zip(_NAMES, self._shared_process.rank0_streams, strict=True):
        if given.get(name) != subprocess.PIPE:
            setattr(self, name, None)
            continue
        end = _SharedPipe(self._shared_process, name, -1 if stream is None else stream.fileno())
        setattr(self, name, _wrap_stream(self, end, size, is_input=name == "stdin"))


def _wrap_stream(self: Any, end: _SharedPipe, size: int, *, is_input: bool) -> Any:
    """The file object that Popen would make of a pipe."""
    line_buffering = is_input and self.text_mode and size == 1
    size = io.DEFAULT_BUFFER_SIZE if size in (-1, 1) else size
    if not is_input and size:
        size = max(size, 1 << 16)  # each read of the pipe is a message to all ranks
    buffered = io.BufferedWriter if is_input else io.BufferedReader
    stream: Any = buffered(end, size) if size else end
    if not self.text_mode:
        return stream
    options: dict[str, Any] = {"encoding": self.encoding, "errors": self.errors}
    if is_input:
        options |= {"write_through": True, "line_buffering": line_buffering}
    return io.TextIOWrapper(stream, **options)


class _SharedPipe(io.RawIOBase, children.PipeEnd):
    """One end of a pipe, of which rank 0 has the descriptor."""

    def __init__(self, process: SharedProcess, name: str, fd: int) -> None:
        self._process, self._name = process, name
        self.fd = fd

    def readable(self) -> bool:
        """Whether the command writes into this pipe."""
        return self._name != "stdin"

    def writable(self) -> bool:
        """Whether the command reads from this pipe."""
        return self._name == "stdin"

    def readinto(self, buffer: Any) -> int:
        """As in io.RawIOBase."""
        count = len(buffer)
        data = self._process.run_on_rank0(
            "reading", lambda: _read(self.fd, count), stream=self._name
        )
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """As in io.RawIOBase."""
        with memoryview(data) as view:
            content = view.tobytes()
        return self._process.run_on_rank0(
            "writing", lambda: _write(self.fd, content), may_end=False, stream=self._name
        )

    def fileno(self) -> int:
        """Raise UneditedError: only rank 0 has a descriptor."""
        raise UneditedError(
            "this script asks for the file descriptor of a command's stream, but only rank 0 has "
            "the command; the other ranks get from it what the command writes. Use read, "
            "readline, write or communicate; or run this script with one rank (-n 1), or with "
            "--plain."
        )

    def isatty(self) -> bool:
        """As in io.RawIOBase."""
        return False

    def close(self) -> None:
        """As in io.RawIOBase."""
        if not self.closed and self.fd >= 0:
            stream = self._process.rank0_streams[_NAMES.index(self._name)]
            if stream is not None and not stream.closed:
                stream.close()
        super().close()


# ---------------------------------------------------------------------------------- methods


def _shared_process(self: Any) -> SharedProcess | None:
    """The shared process of a Popen object; None if its process is this rank's own."""
    process = getattr(self, "_shared_process", None)
    return process if isinstance(process, SharedProcess) else None


def poll(original: Function, self: Any) -> Any:
    """For Popen.poll."""
    return _returncode(self, "polling", partial(original, self))


def wait(original: Function, self: Any, timeout: float | None = None) -> Any:
    """For Popen.wait."""
    return _returncode(self, "waiting", partial(original, self, timeout))


def _returncode(self: Any, name: str, function: Callable[[], Any]) -> Any:
    process = _shared_process(self)
    if process is None:
        return function()
    if self.returncode is None:
        _set_returncode(self, process.run_on_rank0(name, function))
    return self.returncode


def _set_returncode(self: Any, code: int | None) -> None:
    self.returncode = code
    if code is not None:
        children.remove_pid(self.pid)


def send_signal(original: Function, self: Any, sig: int) -> Any:
    """For Popen.send_signal, which terminate and kill call."""
    process = _shared_process(self)
    if process is None:
        return original(self, sig)
    return process.run_on_rank0("a signal", lambda: original(self, sig), may_end=False)


def communicate(
    original: Function,
    self: Any,
    input: Any = None,  # noqa: A002  # Popen's own name for it
    timeout: float | None = None,
) -> Any:
    """For Popen.communicate."""
    process = _shared_process(self)
    if process is None:
        return original(self, input, timeout)
    streams = [getattr(self, name) for name in _NAMES]
    if timeout is None and not self._communication_started and streams.count(None) > 1:
        return original(self, input)  # a read or a write, and a wait
    if self.stdin is not None and not self.stdin.closed and not self._communication_started:
        with suppress(BrokenPipeError):
            self.stdin.flush()

    def run_original() -> tuple[Any, int]:
        own = zip(_NAMES, process.rank0_streams, strict=True)  # those that Popen has made
        with replaced(*((self, name, stream) for name, stream in own)):
            return original(self, input, timeout), self.returncode

    try:
        outputs, code = process.run_on_rank0("communicating", run_original)
        _set_returncode(self, code)
    finally:
        self._communication_started = True
    for stream in streams:
        if stream is not None:
            stream.close()
    return tuple(map(process.files.with_own_names, outputs))
