"""The training loop of a script under `--checkpoint`: saved after each iteration, and resumed.

The script's own loop asks for its next value, or for its test, through an object of this module.
Everything that the script holds at that point is what a process needs to go on from there.
"""

from __future__ import annotations

import shlex
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from instep.distributed.communication.transport import get_transport
from instep.distributed.identity import torch_devices
from instep.distributed.numbers import each_on_any_rank
from instep.process import frames_from, print_line
from instep.process.exit_status import REQUEUE
from instep.training.checkpoint.folder_lock import FolderLock
from instep.training.checkpoint.on_disk import storage
from instep.training.checkpoint.resume_point import ResumePoint
from instep.training.checkpoint.time_limit import SignalFlag
from instep.training.random_streams import RNGStates
from instep.unedited import launcher_env, seeds
from instep.unedited.checkpoint.encoding import encode
from instep.unedited.checkpoint.restoring import RESUMES_BY_ITSELF, restore
from instep.unedited.checkpoint.script_objects import ScriptObjects, find_scopes, hold
from instep.unedited.checkpoint.written_files import WrittenFiles
from instep.unedited.errors import CannotSaveScriptError
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.run.sharded_output import gather_outputs

SHARE = 0.1
"""The part of the time that saving may take; an iteration that ends too early is not saved."""
_END = object()


class LoopIterations:
    """All training loops of a script, which runs into one after another.

    From then on no sharded call leaves rows in attributes of modules.
    """

    def __init__(self, folder: Path) -> None:
        call_state.saves_attributes = True
        self._folder = folder
        self._entered = 0
        self._lock: FolderLock | None = None
        self._flag: SignalFlag | None = None
        self._lines: set[tuple[types.CodeType, int, int]] = set()
        """Of each loop that was entered: the code, the first line and the last one of the body."""
        self._loops: dict[tuple[types.CodeType, int], _Loop] = {}
        """The latest run of each loop, by its code and first line."""
        self._files = WrittenFiles(folder, self._is_in_loop)

    def each(self, values: Iterable[Any], line: int, last_line: int) -> Iterable[Any]:
        """The values of a `for` loop in these lines."""
        return _ForIterations(iter(values), self._enter(sys._getframe(1), line, last_line))

    def tests(self, line: int, last_line: int) -> WhileIterations:
        """For a `while` loop in these lines."""
        return WhileIterations(self._enter(sys._getframe(1), line, last_line))

    def leave(self, line: int) -> None:
        """Behind the loop that begins in this line."""
        frame = sys._getframe(1)
        self._loops[frame.f_code, line].leave(frame)

    def return_value(self, value: Any, line: int) -> Any:
        """`value`, with which a `return` leaves the loop that begins in this line."""
        self._loops[sys._getframe(1).f_code, line].leave_function()
        return value

    def _enter(self, frame: types.FrameType, line: int, last_line: int) -> _Loop:
        self._entered += 1
        self._lines.add((frame.f_code, line, last_line))
        if self._flag is None:
            self._flag = SignalFlag(self._is_in_loop)
        if self._lock is None and get_transport().rank == 0:
            with bypass_overlay():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(self._folder)
        loop = _Loop(self._folder / f"loop-{self._entered}", line, self._files, self._flag)
        self._loops[frame.f_code, line] = loop
        return loop

    def _is_in_loop(self, frame: types.FrameType | None) -> bool:
        return any(
            each.f_code is code and line <= (each.f_lineno or 0) <= last_line
            for each in frames_from(frame)
            for code, line, last_line in self._lines
        )


class _ForIterations:
    def __init__(self, values: Iterator[Any], loop: _Loop) -> None:
        self._values, self._loop = values, loop

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        frame = sys._getframe(1)
        if not self._loop.has_begun:
            first = None
            for k in range(self._loop.begin(frame)):
                value = next(self._values, _END)
                first = first if k else value
            value = _END if self._loop.was_left else next(self._values, _END)
            self._loop.note_first(value if first is None else first)
        else:
            value = next(self._values, _END)
            self._loop.end_iteration(frame, is_last=value is _END)
        if value is _END:
            self._loop.has_ended = True
            raise StopIteration
        return value


class WhileIterations:
    """Stands before the test of a `while` loop."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def next(self) -> bool:
        """An iteration has ended, or the first one is about to begin; False if the loop was left
        when it was saved."""
        frame = sys._getframe(1)
        if not self._loop.has_begun:
            self._loop.begin(frame)
        else:
            self._loop.end_iteration(frame, is_last=False)
        return not self._loop.was_left


class _Loop:
    """One run of a loop, and its folder of checkpoints."""

    def __init__(self, folder: Path, line: int, files: WrittenFiles, flag: SignalFlag) -> None:
        self.has_begun = False
        self.was_left = False
        """Whether the iteration that came last has left it, by `break`."""
        self.has_ended = False
        """Whether there are no more values."""
        self._folder, self._line, self._files, self._flag = folder, line, files, flag
        self._rank = get_transport().rank
        self._before: ScriptObjects | None = None
        self._iteration = 0
        self._first: int | None = None
        """The value of the first iteration, if it is a number."""
        self._arguments = sys.argv[1:]
        self._has_saved = False
        self._saved_at = self._cost = 0.0

    def begin(self, frame: types.FrameType) -> int:
        """Called before the first iteration; restores the latest checkpoint, if there is one.

        Returns the number of iterations that it has behind it. Collective.
        """
        self.has_begun = True
        self._place = f"{Path(frame.f_code.co_filename).name}:{self._line}"
        with bypass_overlay():
            found = storage.read_latest(self._folder) if self._rank == 0 else None
            state: dict[str, Any] | None = None
            if found is not None:
                path, state = found
                _note(storage.step_of(path), path)
                iteration = state["position"]["iteration"]
                state["appended"] = self._files.read_notes(self._folder.name, iteration)
        state = get_transport().broadcast_object(state, 0)
        self._before = hold(frame)
        if state is not None:
            self._resume(state)
        self._saved_at = monotonic()
        return self._iteration

    def _resume(self, state: dict[str, Any]) -> None:
        assert self._before is not None
        restore(state["script"], self._before)
        problems = self._files.restore(state["files"], state["appended"])
        self._has_saved = True
        self._iteration = state["position"]["iteration"]
        self._first = state["position"]["first"]
        self.was_left = state["position"]["was_left"]
        _restore_streams(state["streams"])
        saved = state["position"].get("arguments", self._arguments)
        if saved != self._arguments:
            problems = [
                *problems,
                f"it was saved with other arguments, {shlex.join(saved) or 'none'}, and what is "
                "saved (such as the optimizer's learning rate) is as those have set it",
            ]
        if self._rank == 0:
            self._files.begin_notes(self._folder.name, self._iteration)
            line = (
                f"resumed from {self._folder}: goes on after iteration {self._iteration} of the "
                f"loop at {self._place}"
            )
            print_line("; ".join([line, *problems]))

    def note_first(self, value: Any) -> None:
        """`value`: what the first of all iterations had. Called when the loop has begun.

        Raises CannotSaveScriptError if it was another one when the checkpoint was written.
        """
        if not isinstance(value, int):
            return
        if self._first not in (None, value):
            raise CannotSaveScriptError(
                f"the checkpoint does not fit this script: the loop at {self._place} begins with "
                f"{value} now, and began with {self._first}. {RESUMES_BY_ITSELF}"
            )
        self._first = value

    def end_iteration(self, frame: types.FrameType, *, is_last: bool) -> None:
        """Called after each iteration: rank 0 saves, unless that would take too much of the time.

        If a signal has come to any rank, rank 0 saves in any case, and all ranks exit. Raises
        CannotSaveScriptError after the first iteration, if the script cannot be saved. Collective.
        """
        self._iteration += 1
        pause = self._cost * (1 - SHARE) / SHARE
        is_due = is_last or (self._rank == 0 and monotonic() - self._saved_at >= pause)
        must_end, must_save = each_on_any_rank([self._flag.is_set, is_due], get_transport())
        if must_save or must_end:
            gather_outputs()
            if self._rank == 0:
                self._try_to_save(frame)
        if must_end:
            self._exit_after_saving()

    def leave(self, frame: types.FrameType) -> None:
        """Called behind the loop: if a signal has come in an iteration that ended with `break`,
        rank 0 saves, and all ranks exit. Collective."""
        if self.has_ended or not each_on_any_rank([self._flag.is_set], get_transport())[0]:
            return
        self._iteration += 1
        self.was_left = True
        gather_outputs()
        if self._rank == 0:
            self._try_to_save(frame)
        self._exit_after_saving()

    def leave_function(self) -> None:
        """Called before `return` leaves the loop: if a signal has come in this iteration, all
        ranks exit. It is repeated, since what it returns cannot be saved. Collective."""
        if each_on_any_rank([self._flag.is_set], get_transport())[0]:
            what = f"in iteration {self._iteration + 1}"
            self._exit(f"{what} on a signal, before its return; {self._folder} holds earlier ones")

    def _exit_after_saving(self) -> NoReturn:
        what = f"after iteration {self._iteration}"
        self._exit(f"{what} on a signal, and {self._folder} holds it")

    def _exit(self, what: str) -> NoReturn:
        get_transport().broadcast_object(None, 0)  # the first rank that exits ends the others
        if self._rank == 0:
            print_line(
                f"the loop at {self._place} was left {what}; exit code {REQUEUE} asks for the job "
                "to be queued again"
            )
        raise SystemExit(REQUEUE)

    def _try_to_save(self, frame: types.FrameType) -> None:
        started = monotonic()
        try:
            self._save(frame)
        except CannotSaveScriptError as error:
            if not self._has_saved:
                raise
            print_line(f"nothing is saved after iteration {self._iteration}: {error}")
        self._has_saved = True
        self._saved_at = monotonic()
        self._cost = self._saved_at - started

    def _save(self, frame: types.FrameType) -> None:
        assert self._before is not None
        state = {
            "position": {
                "iteration": self._iteration,
                "line": self._line,
                "first": self._first,
                "was_left": self.was_left,
                "arguments": self._arguments,
            },
            "streams": _streams(),
            "script": encode(self._before, ScriptObjects(find_scopes(frame))),
            "files": self._files.encode(),
        }
        with bypass_overlay():
            path = storage.write(self._folder, self._iteration, state)
            self._files.begin_notes(self._folder.name, self._iteration)
            _note(self._iteration, path)
            for old in storage.list_checkpoints(self._folder)[2:]:
                storage.remove(old)


def _streams() -> dict[str, Any]:
    """The states of the global generators."""
    return {
        **vars(RNGStates.capture()),
        "devices": [generator.get_state() for generator in torch_devices.generators()],
        "seeds": seeds.calls(),
    }


def _restore_streams(saved: dict[str, Any]) -> None:
    RNGStates(saved["torch"], saved["numpy"], saved["python"]).restore()
    seeds.set_calls(saved["seeds"])
    if saved["devices"]:
        for generator, state in zip(
            torch_devices.generators(begin=True), saved["devices"], strict=False
        ):
            generator.set_state(state)


def _note(iteration: int, path: Path) -> None:
    """Note for the supervisor what is saved. Its variables are masked from the script."""
    ResumePoint(iteration, str(path)).note(launcher_env.launched_environ())
