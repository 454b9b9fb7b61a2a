"""Collectives that ranks submit by name, in any order; one thread executes them in one order.

The thread has a process group of its own, so whatever the script itself sends between ranks is not
disturbed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from instep.distributed.communication import groups
from instep.distributed.communication.errors import NotAMemberError
from instep.distributed.communication.groups import Group
from instep.distributed.negotiation.coordinator import SHUTDOWN, StallCheck, open_link
from instep.distributed.negotiation.errors import NameInFlightError, NegotiationError
from instep.distributed.negotiation.execution import execute, make_zeros
from instep.distributed.negotiation.message_table import Key, MessageTable, Request, Response
from instep.distributed.rendezvous import bootstrap
from instep.errors import InstepError


class Task:
    """A collective that this rank has submitted."""

    def __init__(
        self, wish: Request, tensors: Sequence[Tensor] = (), into: Sequence[Tensor] | None = None
    ) -> None:
        self.wish = wish
        self.tensors = [tensor.detach() for tensor in tensors]
        """What this rank gives."""
        self.into = None if into is None else [tensor.detach() for tensor in into]
        """Where the results go; None for new tensors."""
        self.stream = torch.cuda.current_stream() if wish.device == "cuda" else None
        """Where the tensors come from and the results are used, on a GPU."""
        self._over = threading.Event()
        self._outcome: tuple[Response, list[Tensor]] | Exception

    @property
    def over(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._over.is_set()

    def wait(self) -> tuple[Response, list[Tensor]]:
        """What was agreed and what came of it. Raises NegotiationError, OverflowedError."""
        self._over.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def end(self, outcome: tuple[Response, list[Tensor]] | Exception) -> None:
        """Let `wait` return."""
        self._outcome = outcome
        self._over.set()


class Negotiator:
    """This rank's side. Made, and closed, by all ranks of the world."""

    def __init__(self, patience: StallCheck) -> None:
        world = bootstrap.init()
        self.world = groups.group(range(world.size))
        """All ranks."""
        self._groups = {self.world.ranks: self.world}
        self._tasks: dict[Key, Task] = {}
        self._lock = threading.Lock()
        self._end: NegotiationError | None = None
        self._line = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        if world.size > 1:
            self._line = open_link(world, patience)
            self._thread = threading.Thread(target=self._serve, name="instep", daemon=True)
            self._thread.start()

    def admit(self, group: Group) -> None:
        """Let collectives take place among the ranks of `group` too."""
        self._groups[group.ranks] = group

    def dismiss(self, ranks: tuple[int, ...]) -> None:
        """No more among these. The members have nothing under way there."""
        groups.release(self._groups.pop(ranks))

    def submit(self, task: Task) -> Task:
        """This rank is ready for `task`; returns it at once. From any thread.

        Raises NameInFlightError, NotAMemberError, NegotiationError where it is over already.
        """
        wish = task.wish
        me = bootstrap.current().rank
        if me not in wish.members:
            raise NotAMemberError(me, wish.members)
        with self._lock:
            if self._end is not None:
                raise self._end
            if wish.key in self._tasks:
                raise NameInFlightError(wish.name, self._tasks[wish.key].wish.line)
            self._tasks[wish.key] = task
        self._say(wish)  # without the lock: whoever reads the answers needs it
        if self._line is None:
            for verdict in MessageTable(1).hear(0, wish, 0.0):
                self._settle(verdict)
        return task

    def close(self) -> None:
        """Leave; what is under way on any rank ends with an error."""
        if self._line is not None:
            self._say(SHUTDOWN)
            self._thread.join()
            self._line.close()
        for group in self._groups.values():
            groups.release(group)

    def _say(self, what: Request | None) -> None:
        if self._line is not None:
            with suppress(OSError):  # the coordinator has ended: the thread hears that too
                self._line.end.send(what)

    def _serve(self) -> None:
        """The thread: execute what it is told, until the end."""
        assert self._line is not None
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread has the first one
        end: Response | NegotiationError
        try:
            while isinstance(end := self._line.end.receive(), Response):
                self._settle(end)
        except (EOFError, OSError):
            end = NegotiationError.rank_left(0, self.world.size)
        self._line.end.hang_up()
        with self._lock:
            self._end = end
            left, self._tasks = self._tasks, {}
        for task in left.values():
            task.end(end)

    def _settle(self, verdict: Response) -> None:
        wish = verdict.wish
        task = self._tasks.get(wish.key) or Task(wish, make_zeros(verdict))  # this rank has joined
        outcome: tuple[Response, list[Tensor]] | Exception
        if verdict.fault is not None:
            outcome = verdict.fault
        else:
            try:
                with torch.no_grad(), torch.cuda.stream(task.stream):
                    group = self._groups[wish.members]
                    outcome = verdict, execute(verdict, task.tensors, task.into, group)
            except InstepError as error:
                outcome = error
            except Exception as error:  # the one who waits for the task raises it
                outcome = NegotiationError(
                    f"{wish.name} broke off: {error}. A rank that ended is the usual cause."
                )
        with self._lock:
            self._tasks.pop(wish.key, None)
        task.end(outcome)
