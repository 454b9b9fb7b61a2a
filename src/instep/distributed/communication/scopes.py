"""Run once: one rank runs a piece of the script, in a world of one; all get what came of it."""

from __future__ import annotations

import functools
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from instep.distributed.communication.errors import RunOnceError
from instep.distributed.communication.forbid_collectives import (
    line_of_script,
    no_collectives,
)
from instep.distributed.communication.transport import Transport, group_rank, transport
from instep.distributed.rendezvous import bootstrap
from instep.process.patching import Patch, PatchHandle
from instep.process.procfs import ProcessHandle, process_address

P = ParamSpec("P")
T = TypeVar("T")

_MOMENT = timedelta(milliseconds=200)
_begun = 0
"""How many scopes all ranks have entered: the name of the next one in the store."""


def single_process_scope(rank: int = 0) -> Scope:
    """Let one rank run a piece of the script while the others wait; all get its value.

        @instep.single_process_scope()
        def evaluate(model):
            ...
            return accuracy

        with instep.single_process_scope() as here:
            if here:
                here.value = prepare_data()
        data = here.value

    Decorated, the function's value is returned on every rank. Python cannot skip the body of a
    `with`, so there the condition is written out; an error says where it was forgotten.

    An exception is raised on every rank, with the traceback of the rank that ran it as a note.
    Value and exception are pickled; one that cannot be becomes a RunOnceError on all ranks, with
    the traceback. Tensors should be on the CPU.

    Inside, the world is of one: `instep.rank` is 0 and `world_size` 1, all of instep's operations
    are those of a single process, and `torch.distributed.is_initialized()` is False. A collective
    of torch itself raises InsideScopeError at once (but for those that C++ makes on its own, such
    as DistributedDataParallel's). The other ranks wait as long as it takes, hours too, and raise
    RunOnceError when they see that the running rank has ended. Scopes nest: inside of one, and in
    a world of one, the code just runs.

    Args:
        rank: who runs it.

    Collective: every rank comes here. Raises ValueError for a rank that does not exist.
    """
    return Scope(rank)


class Scope:
    """What `single_process_scope` returns: a decorator and a context manager, usable again."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._turns: list[tuple[_Turn, ExitStack]] = []

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function, run by one rank at each call; its value on every rank."""

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            with Scope(self.rank) as here:
                if here:
                    here.value = function(*args, **kwargs)
            result: T = here.value
            return result

        return once

    def __enter__(self) -> Here:
        way = transport()
        turn = _OnlyTurn() if way.size == 1 else _SharedTurn(self.rank, way, line_of_script())
        inside = ExitStack()
        inside.enter_context(turn.inside())
        self._turns.append((turn, inside))
        return turn.here

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        turn, inside = self._turns.pop()
        inside.close()
        turn.hand_over(error)


class Here:
    """Whether this rank runs the scope, `if here:`, and what comes of it, `here.value`."""

    def __init__(self, runs: bool) -> None:
        self.value: Any = None
        """Set by the rank that runs the scope; every rank has it after the end."""
        self._runs = runs
        self._asked = False

    def __bool__(self) -> bool:
        self._asked = True
        return self._runs


class _Turn(Protocol):
    """One passage of this rank through a scope."""

    here: Here

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is different while it lasts."""

    def hand_over(self, error: BaseException | None) -> None:
        """It has ended, with this exception on this rank: all get the value, or all raise.

        Returns where `error` goes on being raised.
        """


class _OnlyTurn:
    """In a world of one."""

    def __init__(self) -> None:
        self.here = Here(runs=True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        yield

    def hand_over(self, error: BaseException | None) -> None:
        return None


@dataclass(frozen=True)
class _Outcome:
    """What the other ranks get of a scope."""

    pickled: bytes
    """The value or the exception."""
    trace: str | None = None
    """The traceback, of an exception."""


class _SharedTurn:
    """Among several ranks. The waiting ones wait for a key in the store, not in a collective."""

    def __init__(self, rank: int, way: Transport, line: str) -> None:
        global _begun
        self._runs = way.rank == group_rank(rank, "rank", None)
        self._rank, self._way, self._line = rank, way, line
        self._store = bootstrap.store()
        self._key = f"instep/scope/{_begun}"
        self.here = Here(self._runs)
        _begun += 1
        if self._runs:
            self._store.set(f"{self._key}/runner", process_address())

    @contextmanager
    def inside(self) -> Iterator[None]:
        with no_collectives(self._rank, self._line), ExitStack() as stack:
            if self._runs:
                source = f"the single_process_scope at {self._line}"
                stack.enter_context(bootstrap.world_of_one(source))
                stack.enter_context(
                    PatchHandle([Patch(dist, "is_initialized", lambda original: False)])
                )
            yield

    def hand_over(self, error: BaseException | None) -> None:
        if self._runs:
            self._give(error)
        elif error is None:
            self._take()

    def _give(self, error: BaseException | None) -> None:
        outcome, problem = self._outcome(error)
        self._store.set(f"{self._key}/ended", "1")
        self._way.broadcast_object(outcome, self._rank)
        self._forget()
        if problem is not None:
            raise problem from error

    def _take(self) -> None:
        self._wait()
        outcome = self._way.broadcast_object(_Outcome(b""), self._rank)
        self._forget()
        received = pickle.loads(outcome.pickled)
        if outcome.trace is None:
            self.here.value = received
            return
        if outcome.trace:
            received.add_note(f"On rank {self._rank}, in its {self._name()}:\n\n{outcome.trace}")
        raise received

    def _name(self) -> str:
        return f"single_process_scope at {self._line}"

    def _outcome(self, error: BaseException | None) -> tuple[_Outcome, RunOnceError | None]:
        """What the others get, and what this rank raises if not `error` itself."""
        problem: RunOnceError | None = None
        if error is None and not self.here._asked:
            problem = RunOnceError.not_asked(self._line)
        elif error is None:
            try:
                return _Outcome(pickle.dumps(self.here.value)), None
            except Exception as why:  # whatever the value's own code raises, the others wait
                kind = type(self.here.value).__name__
                problem = RunOnceError.value(self._rank, self._line, kind, str(why))
        elif (trace := format_traceback(error)) and survives_pickling(error):
            return _Outcome(pickle.dumps(error), trace), None
        else:
            problem = RunOnceError.exception(self._rank, self._line, type(error).__name__, trace)
        return _Outcome(pickle.dumps(problem), ""), problem

    def _wait(self) -> None:
        """Return when the scope has ended; raise RunOnceError when its rank has."""
        ended, address = f"{self._key}/ended", f"{self._key}/runner"
        runner: ProcessHandle | None = None
        try:
            while not self._came(ended):
                if runner is None and self._store.check([address]):
                    runner = ProcessHandle(self._store.get(address).decode())
                if runner is not None and runner.has_ended() and not self._store.check([ended]):
                    raise RunOnceError.lost(self._rank, self._line, "its process is gone")
        finally:
            if runner is not None:
                runner.close()

    def _came(self, key: str) -> bool:
        """Whether `key` is there within a moment."""
        try:
            self._store.wait([key], _MOMENT)
        except RuntimeError:  # the time is up: each store says it in its own words
            try:
                return self._store.check([key])
            except RuntimeError as error:
                seen = f"the ranks' store does not answer ({error})"
                raise RunOnceError.lost(self._rank, self._line, seen) from error
        return True

    def _forget(self) -> None:
        """The last rank deletes the keys."""
        if self._store.add(f"{self._key}/done", 1) == self._way.size:
            for what in ("runner", "ended", "done"):
                self._store.delete_key(f"{self._key}/{what}")


def format_traceback(error: BaseException) -> str:
    """As Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()


def survives_pickling(error: BaseException) -> bool:
    """Whether an exception that travels to another rank is still what it was."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own code raises
        return False
    return type(copy) is type(error) and str(copy) == str(error)
