"""What a forward does that cannot be undone: it prints, logs, or writes files.

A call that does is not made a second time for a comparison, nor is one that changes the buffers of
a module from outside.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing.connection import Connection
from multiprocessing.queues import JoinableQueue
from multiprocessing.queues import Queue as ProcessQueue
from typing import Any
from weakref import ref

import torch.autograd.graph
from torch import Tensor, nn

from instep.process.patching import Function, replaced
from instep.process.pending_writes import marked_file, opens_to_write
from instep.process.process_value import ProcessValue
from instep.process.torch_private.autograd import HOOKED_NODE
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.plan.module_state.module_properties import is_library
from instep.unedited.sharded_call.plan.whole_reasons import FREEZES, ReasonKind, WholeReason

_CACHES = ("__pycache__", f"{os.sep}.cache{os.sep}", "torchinductor", os.devnull)
"""Parts of the paths of files that processes share by design."""
_OF_SYSTEM = ("/proc/", "/sys/", "/dev/")
_OF_GRADIENTS = ((Tensor, "register_hook"), (Tensor, "retain_grad"), HOOKED_NODE)
_MESSAGES = (
    *((ProcessQueue, name) for name in ("put", "get")),
    (JoinableQueue, "put"),
    *((Connection, name) for name in ("send", "send_bytes", "recv", "recv_bytes")),
)
_MULTI_GRAD_HOOKS = torch.autograd.graph.__file__
"""Where a hook on several tensors is registered on each of them."""
_ENVIRONMENT = os.getenv.__code__.co_filename
"""Where `os.environ` sets variables."""

PRINTS = WholeReason("its forward prints", ReasonKind.SIDE_EFFECT)
_LOGS = WholeReason("its forward logs", ReasonKind.SIDE_EFFECT)


@dataclass(frozen=True)
class PendingWarning:
    """A warning that is not shown yet."""

    show: Callable[[], None]
    registry: dict[Any, Any]
    """Where Python notes which warnings of a module were shown, by their keys."""
    key: Any


class SideEffects:
    """The side effects of a forward on this thread."""

    def __init__(self, *, is_silent: bool, is_lasting_error: bool) -> None:
        self.is_silent = is_silent
        """Whether what it prints is dropped."""
        self._is_lasting_error = is_lasting_error
        self.first: WholeReason | None = None
        """What it did first, which rules out sharding."""
        self.warnings: list[PendingWarning] = []
        """What a silent one has warned of: shown if it counts, forgotten if it is made anew."""
        self.files_read: dict[str, None] = {}
        """The files that it has opened to read them, but those of packages and of the system."""
        self._thread = threading.current_thread()

    def note(self, effect: WholeReason) -> bool:
        """Note one; returns whether it is dropped, if that can be."""
        if threading.current_thread() is not self._thread:
            return False
        self.first = self.first or effect
        return self.is_silent

    def note_file(self, file: Any) -> None:
        """Note a file that it opens to read it."""
        is_path = isinstance(file, str | bytes | os.PathLike)
        if threading.current_thread() is not self._thread or not is_path:
            return
        path = os.path.abspath(os.fsdecode(file))
        if not (path.startswith(_OF_SYSTEM) or is_library(path)):
            self.files_read[path] = None

    def drops(self, write: Function, text: Any, is_warning: bool) -> bool:
        """Whether a text that is printed is dropped; it is noted unless it is a warning: one of
        each is shown, and as well in a call that is computed twice."""
        return self.is_silent if is_warning else self.note(PRINTS)

    def show_warnings(self) -> None:
        """Show what was held back."""
        for warning in self.warnings:
            warning.show()

    def reset_warnings(self) -> None:
        """Let Python show the same warnings again."""
        for warning in self.warnings:
            warning.registry.pop(warning.key, None)

    def note_lasting(self, text: str) -> None:
        """Note what it is about to do and nobody drops. Raises ShardedCallError if it must not."""
        self.note(WholeReason(text, ReasonKind.SIDE_EFFECT))
        if self._is_lasting_error and threading.current_thread() is self._thread:
            raise ShardedCallError(text)


_current: ProcessValue[SideEffects | None] = ProcessValue(None)
"""Where those of the forward under way are noted; None: nowhere."""


def defer_warning(warning: PendingWarning) -> bool:
    """Hold a warning of a silent forward back; returns whether this is one."""
    effects = _current.value
    if effects is None or not effects.is_silent:
        return False
    effects.warnings.append(warning)
    return True


@contextmanager
def observed(*, is_silent: bool = False, is_lasting_error: bool = False) -> Iterator[SideEffects]:
    """Inside, side effects are noted; with `is_silent` what is printed is dropped, and with
    `is_lasting_error` to open a file for writing, to set an environment variable, or to use a queue
    or a pipe of other processes, is a ShardedCallError."""
    _install_audit_hook()
    effects = SideEffects(is_silent=is_silent, is_lasting_error=is_lasting_error)
    methods: list[tuple[object, str, object]] = [
        (owner, name, _noting_method(owner, name, effects)) for owner, name in _OF_GRADIENTS
    ]
    methods.append((Tensor, "requires_grad_", _noting_unfreezing(effects)))
    methods += [(owner, name, _noting_message(owner, name, effects)) for owner, name in _MESSAGES]
    methods.append((logging.Handler, "handle", _noting_record(effects)))
    methods += [(owner, "open", _noting_open(owner, effects)) for owner in (builtins, io)]
    with watched_writes(effects.drops), replaced(*methods), _current.set_to(effects):
        yield effects


class OutsideCalls:
    """The modules that a forward calls which are no parts of its own module."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._own = {id(part) for part in parts}
        self._seen: dict[int, tuple[ref[nn.Module], str, list[tuple[Tensor, int]]]] = {}

    def note(self, module: nn.Module) -> None:
        """Note a module that is about to be called, and which numbers its buffers have."""
        if id(module) not in self._own and id(module) not in self._seen:
            kept = [(x, x._version) for x in module.buffers() if not x.is_inference()]
            self._seen[id(module)] = ref(module), type(module).__name__, kept

    def find_change(self) -> WholeReason | None:
        """Say whose buffers were changed; None if nobody's. A module that the forward has made is
        gone by now, or a part of the other one."""
        for module, name, kept in self._seen.values():
            if module() is not None and any(x._version != version for x, version in kept):
                text = f"its forward changes buffers of a {name} from outside in place"
                return WholeReason(text, ReasonKind.LASTING)
        return None


def recorded_samples() -> int:
    """How many samples and parameters Pyro's running traces have: none is recorded twice."""
    frames = getattr(sys.modules.get("pyro.poutine.runtime"), "_PYRO_STACK", ())
    return sum(len(frame.trace.nodes) for frame in frames if hasattr(frame, "trace"))


@contextmanager
def watched_outside_calls(parts: Iterable[nn.Module]) -> Iterator[OutsideCalls]:
    """Inside, the calls of modules that are none of these are noted."""
    calls, original = OutsideCalls(parts), nn.Module.__call__

    @wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.note(module)
        return original(module, *args, **kwargs)

    with replaced((nn.Module, "__call__", call)):
        yield calls


def watched_writes(
    drops: Callable[[Function, Any, bool], bool],
) -> AbstractContextManager[None]:
    """Inside, a standard stream calls `drops(write, text, is_warning)` before it writes a text, and
    drops the text if that is so.

    `write`: the stream's method; `is_warning`: whether the text comes from the module warnings.
    """

    def asking(write: Function) -> Function:
        def ask(text: Any) -> Any:
            is_warning = sys._getframe(1).f_globals.get("__name__") == "warnings"
            return len(text) if drops(write, text, is_warning) else write(text)

        return ask

    return replaced_in_streams("write", asking)


def replaced_in_streams(
    name: str, make: Callable[[Function], Function]
) -> AbstractContextManager[None]:
    """Inside, `make(method)` stands in for the method of this name of the standard streams."""
    given = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    streams = {id(s): s for s in given if hasattr(s, name) and hasattr(s, "__dict__")}.values()
    return replaced(*((stream, name, make(getattr(stream, name))) for stream in streams))


def _noting_method(owner: type, name: str, effects: SideEffects) -> Any:
    """A method of a tensor or a node, whose call is noted: what it keeps of a gradient would be
    that of a part of the rows."""
    method: Any = getattr(owner, name)
    effect = WholeReason(f"its forward looks at the gradient of a tensor ({name.lstrip('_')})")

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not _is_by_library(_MULTI_GRAD_HOOKS):
            effects.note(effect)
        return method(*args, **kwargs)

    return noting if owner is Tensor else staticmethod(noting)


def _noting_message(owner: type, name: str, effects: SideEffects) -> Function:
    """A method of a queue or a pipe between processes, whose call is noted."""
    method: Function = getattr(owner, name)

    @wraps(method)
    def noting(*args: Any, **kwargs: Any) -> Any:
        effects.note_lasting(f"its forward uses what it shares with other processes ({name})")
        return method(*args, **kwargs)

    return noting


def _noting_open(owner: Any, effects: SideEffects) -> Function:
    """`open`, as the script finds it: on a rank other than 0 the file may lie elsewhere."""
    function: Function = owner.open

    @wraps(function)
    def noting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not opens_to_write(mode, 0):
            effects.note_file(file)
        return function(file, mode, *args, **kwargs)

    return noting


def _is_by_library(file: str) -> bool:
    """Whether a library has called the function that asks, or those of this file which did."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename == file:
        frame = frame.f_back
    return is_library(frame.f_code.co_filename)


def _noting_unfreezing(effects: SideEffects) -> Function:
    """Tensor.requires_grad_, which is noted where a forward calls it for a parameter: it may do so
    with another value in another call."""
    method = Tensor.requires_grad_

    @wraps(method)
    def set_flag(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, nn.Parameter):
            effects.note(FREEZES)
        return method(tensor, *args, **kwargs)

    return set_flag


def _noting_record(effects: SideEffects) -> Function:
    """logging.Handler.handle, of whose records those are noted that are neither torch's, as of
    torch.compile, nor printed: what is printed is noted where the stream writes it."""
    method = logging.Handler.handle

    @wraps(method)
    def handle(handler: logging.Handler, record: logging.LogRecord) -> Any:
        stream = getattr(handler, "stream", None)
        is_printed = stream is not None and stream in (sys.stdout, sys.stderr)
        is_of_torch = record.name.partition(".")[0] == "torch"
        is_dropped = not (is_printed or is_of_torch) and effects.note(_LOGS)
        return False if is_dropped else method(handler, record)

    return handle


@cache  # a hook cannot be removed
def _install_audit_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    effects = _current.value
    if effects is None:
        return
    if event in ("os.putenv", "os.unsetenv"):
        if not _is_by_library(_ENVIRONMENT):
            effects.note_lasting("its forward sets environment variables")
        return
    if event != "open":
        return
    path, mode, flags = args
    if opens_to_write(mode, flags) and isinstance(path, str | bytes):
        written = marked_file(os.fsdecode(path))  # torch.save opens its file in C++
        if not any(part in written for part in _CACHES):
            effects.note_lasting(f"its forward writes files ({os.path.basename(written)})")
