"""What one rank does alone: single_process_scope, on_main_process, print, progress."""

from __future__ import annotations

import builtins
import functools
import itertools
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch.distributed as dist

from instep.distributed import generator_states
from instep.distributed.communication.errors import InsideScopeError, RunOnceError
from instep.distributed.communication.transport import Transport, get_transport, group_rank
from instep.distributed.flight_record.record_format import group_text
from instep.distributed.flight_record.recorder import enter, leave, phase
from instep.distributed.forbidden_collectives import forbid_collectives
from instep.distributed.rendezvous import bootstrap, signed_pickle
from instep.distributed.rendezvous.verified_store import poll_interval
from instep.distributed.watchdog.call_stack import script_line
from instep.process.patching import Patch, PatchHandle
from instep.process.procfs import ProcessHandle, process_address

if TYPE_CHECKING:
    from tqdm import tqdm

P = ParamSpec("P")
T = TypeVar("T")

_numbers = itertools.count()
"""Of the scopes that all ranks have entered; a number names a scope in the store."""


class _EnteredScopes:
    """The scopes that this process has entered."""

    depth = 0
    """How many it is in."""
    outermost = 0
    """How many of them were in no other one: equal on all ranks, and at any N."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.outermost += not self.depth
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


_scopes = _EnteredScopes()


def scope_number() -> int | None:
    """The number of the scope that this process is in; None outside of any."""
    return _scopes.outermost if _scopes.depth else None


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
    `with`, so the condition is written out; an error tells the line where it is missing.

    An exception is raised on every rank, with the traceback of the rank that ran it as a note.
    Value and exception are pickled; one that cannot be becomes a RunOnceError on all ranks, with
    the traceback. Tensors should be on the CPU.

    Random numbers that it draws on the CPU leave in step the ranks that were in step: after it the
    generators of torch, numpy and Python are in the same states on all of these.

    Inside, the world is of one: `instep.rank` is 0 and `world_size` 1, all of instep's operations
    are those of a single process, and `torch.distributed.is_initialized()` is False. A collective
    of torch itself raises InsideScopeError at once (but for those that C++ makes on its own, such
    as DistributedDataParallel's). The other ranks wait as long as it takes, hours too, and raise
    RunOnceError when they see that the running rank has ended. Scopes nest: inside of one, and in
    a world of one, the code just runs.

    Args:
        rank: the rank that runs it; what the collectives call `root`.

    Collective: every rank calls this. Raises ValueError for a rank that does not exist.
    """
    return Scope(rank)


def on_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """The function, run by rank 0 alone; on other ranks a call does nothing and returns None.

        @instep.on_main_process
        def log(loss):
            writer.add_scalar("loss", loss)

    What it draws on the CPU comes from a stream of its own, so that the ranks stay in step. No rank
    waits, and an exception is raised on rank 0 only. It must call nothing that all ranks have to
    call; `single_process_scope` is for values that all ranks need.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if bootstrap.current().rank != 0:
            return None
        with generator_states.separate_states():
            return function(*args, **kwargs)

    return run


def print(*values: object, **options: Any) -> None:  # noqa: A001
    """Python's print, on rank 0 alone; the same arguments."""
    if bootstrap.current().rank == 0:
        builtins.print(*values, **options)


def progress(iterable: Iterable[T], **options: Any) -> tqdm[T]:
    """A progress bar over `iterable`, shown by rank 0 alone: tqdm's, with tqdm's options.

        for x, y in instep.progress(loader, desc="epoch 1"):
            ...

    Every rank gets the same object to iterate over and to call (`set_postfix` and the like); on
    other ranks nothing is shown. A loader of `instep.shard` counts the batches of the whole job.

    Raises ImportError if tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "instep.progress needs tqdm. Install it with: pip install tqdm"
        ) from error
    return tqdm(iterable, **({"disable": bootstrap.current().rank != 0} | options))


class Scope:
    """What `single_process_scope` returns: a decorator and a context manager, usable again."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._entered: list[tuple[_SharedScope | None, ExitStack]] = []
        """Nested scopes; None in a world of one, where the code just runs."""

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function, run by one rank at each call; its value on every rank."""

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            with type(self)(self.rank) as here:
                if here:
                    here.value = function(*args, **kwargs)
            result: T = here.value
            return result

        return once

    def __enter__(self) -> Here:
        transport = get_transport()
        shared = None
        inside = ExitStack()
        if transport.size > 1:
            shared = _SharedScope(self.rank, transport, script_line())
            inside.enter_context(shared.inside())
            inside.enter_context(phase("single_process_scope"))
        elif not bootstrap.is_world_of_one():  # a loader has no epoch of the job's here either
            inside.enter_context(bootstrap.world_of_one("a single_process_scope"))
        inside.enter_context(_scopes.counted())
        self._entered.append((shared, inside))
        return shared.here if shared is not None else Here(runs=True)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shared, inside = self._entered.pop()
        inside.close()
        if shared is not None:
            shared.finish(error)


class Here:
    """Whether this rank runs the scope (`if here:`), and the scope's result (`here.value`)."""

    def __init__(self, runs: bool) -> None:
        self.value: Any = None
        """Set by the rank that runs the scope; every rank has it after the end."""
        self._runs = runs
        self._tested = False

    def __bool__(self) -> bool:
        self._tested = True
        return self._runs


@dataclass(frozen=True)
class _Result:
    """The result of a scope as the other ranks receive it."""

    pickled: bytes
    """The value or the exception."""
    trace: str | None = None
    """The traceback, of an exception."""
    changes: generator_states.Changes = field(default_factory=dict)
    """The generators that the scope has drawn from."""


class _SharedScope:
    """One scope of several ranks. The others wait for a key in the store, not in a collective."""

    def __init__(self, rank: int, transport: Transport, line: str) -> None:
        self._runs = transport.rank == group_rank(rank, "rank", None)
        self._rank, self._transport, self._line = rank, transport, line
        self._store = bootstrap.store()
        self._key = f"instep/scope/{next(_numbers)}"
        self.here = Here(self._runs)
        self._began = 0.0
        """When this rank began to wait."""
        if self._runs:
            self._states = generator_states.get_states()
            leave(self._enter())
            self._store.set(f"{self._key}/runner", process_address())

    def _enter(self) -> int:
        """Note the scope in the flight record as a collective whose root runs it."""
        group = group_text("scopes", range(self._transport.size))
        return enter("single_process_scope", None, None, group, self._rank)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Forbid torch's collectives; on the rank that runs, the world is of one."""
        with forbid_collectives(self._collective_error), ExitStack() as stack:
            if self._runs:
                source = f"the single_process_scope at {self._line}"
                stack.enter_context(bootstrap.world_of_one(source))
                patch = Patch(dist, "is_initialized", lambda original: False)
                stack.enter_context(PatchHandle([patch]))
            yield

    def _collective_error(self, name: str) -> InsideScopeError:
        return InsideScopeError(name, script_line(), self._rank, self._line)

    def finish(self, error: BaseException | None) -> None:
        """All ranks get the value, or all raise. Returns if `error` is to be raised again."""
        if self._runs:
            self._send_result(error)
        elif error is None:
            self._receive_result()

    def _send_result(self, error: BaseException | None) -> None:
        result, problem = self._result(error)
        result = replace(result, changes=generator_states.find_changes(self._states))
        self._store.set(f"{self._key}/ended", "1")
        self._transport.broadcast_object(result, self._rank)
        self._delete_keys()
        if problem is not None:
            raise problem from error

    def _receive_result(self) -> None:
        self._wait()
        result = self._transport.broadcast_object(_Result(b""), self._rank)
        self._delete_keys()
        generator_states.follow(result.changes)
        received = signed_pickle.unpickle(result.pickled)
        if result.trace is None:
            self.here.value = received
            return
        if result.trace:
            name = f"single_process_scope at {self._line}"
            received.add_note(f"On rank {self._rank}, in its {name}:\n\n{result.trace}")
        raise received

    def _result(self, error: BaseException | None) -> tuple[_Result, RunOnceError | None]:
        """The result for the other ranks, and an error for this rank in place of `error`."""
        name = f"the single_process_scope of rank {self._rank} ({self._line})"
        if error is None and not self.here._tested:
            problem = RunOnceError(
                f"the body of the single_process_scope at {self._line} ran on every rank, because "
                "Python cannot skip it. Write `with instep.single_process_scope() as here:` and "
                "inside `if here:`, or decorate a function."
            )
        elif error is None:
            try:
                return _Result(pickle.dumps(self.here.value)), None
            except Exception as why:  # the value's own code may raise anything; the others wait
                problem = RunOnceError(
                    f"{name} returned a {type(self.here.value).__name__} that cannot be sent to "
                    f"the other ranks: {why}. Return something that pickles, or None."
                )
        elif (trace := format_exception(error)) and can_pickle(error):
            return _Result(pickle.dumps(error), trace), None
        else:
            problem = RunOnceError(
                f"{name} raised {type(error).__name__}, an exception that does not pickle. "
                f"On rank {self._rank}:\n\n{trace}"
            )
        return _Result(pickle.dumps(problem), ""), problem

    def _wait(self) -> None:
        """Return when the scope has ended; raise RunOnceError when its rank has."""
        ended, address = f"{self._key}/ended", f"{self._key}/runner"
        runner: ProcessHandle | None = None
        self._began, number = time.monotonic(), self._enter()
        try:
            while not self._is_set(ended):
                if runner is None and self._store.check([address]):
                    runner = ProcessHandle(self._store.get(address).decode())
                if runner is not None and runner.has_ended() and not self._store.check([ended]):
                    raise self._lost("its process is gone")
        finally:
            leave(number)
            if runner is not None:
                runner.close()

    def _is_set(self, key: str) -> bool:
        """Whether `key` is set; waits a little if it is not."""
        try:
            is_set = self._store.check([key])
        except RuntimeError as error:
            raise self._lost(f"the ranks' store does not answer ({error})") from error
        if not is_set:
            time.sleep(poll_interval(time.monotonic() - self._began))
        return bool(is_set)

    def _lost(self, why: str) -> RunOnceError:
        return RunOnceError(
            f"rank {self._rank} ended inside its single_process_scope ({self._line}): {why}. "
            "Its own output says why; the others cannot go on without it."
        )

    def _delete_keys(self) -> None:
        """The last rank deletes the keys."""
        if self._store.add(f"{self._key}/done", 1) == self._transport.size:
            for name in ("runner", "ended", "done"):
                self._store.delete_key(f"{self._key}/{name}")


def format_exception(error: BaseException) -> str:
    """The traceback as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()


def can_pickle(error: BaseException) -> bool:
    """Whether an exception has the same type and message after pickling and unpickling."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own code raises
        return False
    return type(copy) is type(error) and str(copy) == str(error)
