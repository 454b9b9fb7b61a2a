"""subprocess.Popen: rank 0 has the process, and every rank an object that behaves like it.

What depends on time (how much a read returns, whether the process still runs) is asked of rank 0
at each call, so that all ranks take the same path.
"""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from instep.unedited.errors import UneditedError
from instep.unedited.processes import children
from instep.unedited.processes.rebasing import Command
from instep.unedited.rank0_relay import Relay

T = TypeVar("T")
Function = Callable[..., Any]

_NAMES = ("stdin", "stdout", "stderr")
_signature = inspect.signature(subprocess.Popen.__init__)
_read, _write = os.read, os.write


class Told:
    """What a Popen object has whose process rank 0 has started for all."""

    def __init__(self, relay: Relay, name: str, command: Command) -> None:
        self._relay, self._name = relay, name
        self.command = command
        self.real: tuple[Any, ...] = (None, None, None)
        """On rank 0, the streams that Popen has made."""

    @property
    def is_here(self) -> bool:
        """Whether this is rank 0, which has the process."""
        return self._relay.does

    def once(self, what: str, do: Callable[[], T], *, ends: bool = True, of: str = "") -> T:
        """What `do` gives on rank 0; `ends`: the process may have ended by then."""
        if not self._relay.is_of_this_process():
            if self._relay.does:
                return do()
            raise UneditedError.elsewhere()
        in_main = threading.current_thread() is threading.main_thread()
        moment = self.command if ends and in_main else None
        return self._relay.lane(f"{self._name}/{of}").once(what, do, moment=moment)


def init(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """For Popen.__init__."""
    given: dict[str, Any] = _signature.bind(self, *args, **kwargs).arguments
    del given["self"]
    handles = children.handles(given)
    this = children.asked(given["args"], handles, given.get("cwd"))
    if this is None:
        original(self, *args, **kwargs)
        return

    def do() -> tuple[int, int]:
        children.refuse_pipes(handles)
        original(self, **children.on_rank_0(given))
        return self.pid, next(_numbers)

    pid, number = this.begun(do)
    self._told = Told(this.relay, f"popen{number}", this.command)
    if self._told.is_here:
        self._told.real = self.stdin, self.stdout, self.stderr
    else:
        _look_started(self, given, pid)
    children.known(pid)
    _give_streams(self, given)


_numbers = iter(range(1 << 62))


def _look_started(self: Any, given: dict[str, Any], pid: int) -> None:
    """What Popen's methods count on, in a process that has no child."""
    self.args, self.pid, self.returncode = given["args"], pid, None
    self.encoding, self.errors = given.get("encoding"), given.get("errors")
    self.pipesize = given.get("pipesize", -1)
    self.process_group = given.get("process_group", -1)
    self.text_mode = any(map(given.get, ("encoding", "errors", "text", "universal_newlines")))
    self._input, self._communication_started = None, False
    self._closed_child_pipe_fds, self._sigint_wait_secs = True, 0
    self._waitpid_lock = threading.Lock()


def _give_streams(self: Any, given: dict[str, Any]) -> None:
    size = given.get("bufsize", -1)
    for name, real in zip(_NAMES, self._told.real, strict=True):
        if given.get(name) != subprocess.PIPE:
            setattr(self, name, None)
            continue
        end = _End(self._told, name, -1 if real is None else real.fileno())
        setattr(self, name, _opened(self, end, size, is_input=name == "stdin"))


def _opened(self: Any, end: _End, size: int, *, is_input: bool) -> Any:
    """The file object that Popen would make of it."""
    by_lines = is_input and self.text_mode and size == 1
    size = io.DEFAULT_BUFFER_SIZE if size in (-1, 1) else size
    if not is_input and size:
        size = max(size, 1 << 16)  # each read of the end is a message to all ranks
    kind = io.BufferedWriter if is_input else io.BufferedReader
    stream: Any = kind(end, size) if size else end
    if not self.text_mode:
        return stream
    options: dict[str, Any] = {"encoding": self.encoding, "errors": self.errors}
    if is_input:
        options |= {"write_through": True, "line_buffering": by_lines}
    return io.TextIOWrapper(stream, **options)


class _End(io.RawIOBase, children.PipeEnd):
    """One end of a pipe, of which rank 0 has the file descriptor."""

    def __init__(self, told: Told, name: str, fd: int) -> None:
        self._told, self._name = told, name
        self.fd = fd

    def readable(self) -> bool:
        """Whether the command writes here."""
        return self._name != "stdin"

    def writable(self) -> bool:
        """Whether the command reads here."""
        return self._name == "stdin"

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it."""
        count = len(buffer)
        data = self._told.once("reading", lambda: _read(self.fd, count), of=self._name)
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """As io.RawIOBase has it."""
        with memoryview(data) as view:
            content = view.tobytes()
        return self._told.once(
            "writing", lambda: _write(self.fd, content), ends=False, of=self._name
        )

    def fileno(self) -> int:
        """Raises UneditedError: only rank 0 has one."""
        raise UneditedError.stream_of_command("the file descriptor of a command's stream")

    def isatty(self) -> bool:
        """It is a pipe."""
        return False

    def close(self) -> None:
        """As io.RawIOBase has it."""
        if not self.closed and self.fd >= 0:
            real = self._told.real[_NAMES.index(self._name)]
            if real is not None and not real.closed:
                real.close()
        super().close()


# ---------------------------------------------------------------------------------- methods


def _told_of(self: Any) -> Told | None:
    """What there is to be asked of rank 0; None for a process of this rank's own."""
    told = getattr(self, "_told", None)
    return told if isinstance(told, Told) else None


def poll(original: Function, self: Any) -> Any:
    """For Popen.poll."""
    return _code(self, "polling", partial(original, self))


def wait(original: Function, self: Any, timeout: float | None = None) -> Any:
    """For Popen.wait."""
    return _code(self, "waiting", partial(original, self, timeout))


def _code(self: Any, what: str, do: Callable[[], Any]) -> Any:
    told = _told_of(self)
    if told is None:
        return do()
    if self.returncode is None:
        _ended(self, told.once(what, do))
    return self.returncode


def _ended(self: Any, code: int | None) -> None:
    self.returncode = code
    if code is not None:
        children.over(self.pid)


def send_signal(original: Function, self: Any, sig: int) -> Any:
    """For Popen.send_signal, by which terminate and kill go."""
    told = _told_of(self)
    if told is None:
        return original(self, sig)
    return told.once("a signal", lambda: original(self, sig), ends=False)


def communicate(
    original: Function,
    self: Any,
    input: Any = None,  # noqa: A002  # Popen's own name for it
    timeout: float | None = None,
) -> Any:
    """For Popen.communicate."""
    told = _told_of(self)
    if told is None:
        return original(self, input, timeout)
    streams = [getattr(self, name) for name in _NAMES]
    if timeout is None and not self._communication_started and streams.count(None) > 1:
        return original(self, input)  # a read or a write, and a wait
    if self.stdin is not None and not self.stdin.closed and not self._communication_started:
        with suppress(BrokenPipeError):
            self.stdin.flush()

    def do() -> tuple[Any, int]:
        with _real_streams(self, told):
            return original(self, input, timeout), self.returncode

    try:
        texts, code = told.once("communicating", do)
        _ended(self, code)
    finally:
        self._communication_started = True
    for stream in streams:
        if stream is not None:
            stream.close()
    return tuple(map(told.command.as_seen_here, texts))


@contextmanager
def _real_streams(self: Any, told: Told) -> Iterator[None]:
    """In here, on rank 0, Popen's own methods find the streams that they have made."""
    ours = [getattr(self, name) for name in _NAMES]
    for name, stream in zip(_NAMES, told.real, strict=True):
        setattr(self, name, stream)
    try:
        yield
    finally:
        for name, stream in zip(_NAMES, ours, strict=True):
            setattr(self, name, stream)
