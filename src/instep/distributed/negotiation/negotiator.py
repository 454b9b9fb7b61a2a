"""Collectives that ranks submit by name, in any order; one thread executes them in one order.

The thread has a process group of its own, so it does not disturb what the script sends between
ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic_ns

import torch
from torch import Tensor

from instep.distributed.communication import groups
from instep.distributed.communication.errors import NotAMemberError
from instep.distributed.communication.groups import Group
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.identity import torch_devices
from instep.distributed.negotiation.coordinator import SHUTDOWN, StallCheck, open_link
from instep.distributed.negotiation.errors import NameInFlightError, NegotiationError
from instep.distributed.negotiation.execution import execute, make_zeros
from instep.distributed.negotiation.message_table import (
    Key,
    MessageTable,
    Request,
    Response,
    as_range,
)
from instep.distributed.rendezvous import bootstrap
from instep.errors import InstepError


class Task:
    """A collective that this rank has submitted."""

    def __init__(
        self, request: Request, tensors: Sequence[Tensor] = (), into: Sequence[Tensor] | None = None
    ) -> None:
        self.request = request
        self.tensors = [tensor.detach() for tensor in tensors]
        """This rank's inputs."""
        self.into = None if into is None else [tensor.detach() for tensor in into]
        """Tensors for the results; None for new ones."""
        self.stream = torch_devices.current_stream(request.device)
        """The stream of the device that computes the inputs and uses the results."""
        self.submitted = monotonic_ns()
        self._done = threading.Event()
        self._outcome: tuple[Response, list[Tensor]] | Exception

    @property
    def done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._done.is_set()

    def wait(self) -> tuple[Response, list[Tensor]]:
        """The response and the results. Raises NegotiationError, OverflowedError."""
        self._done.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def finish(self, outcome: tuple[Response, list[Tensor]] | Exception) -> None:
        """Let `wait` return, or raise, this outcome."""
        self._outcome = outcome
        self._done.set()


class Negotiator:
    """This rank's side. Made, and closed, by all ranks of the world."""

    def __init__(self, stall_check: StallCheck) -> None:
        world = bootstrap.init()
        self.world = groups.group(range(world.size))
        """All ranks."""
        self._groups = {as_range(self.world.ranks): self.world}
        self._tasks: dict[Key, Task] = {}
        self._lock = threading.Lock()
        self._end: NegotiationError | None = None
        self._link = None
        self._device = torch_devices.index_in_use()
        if world.size > 1:
            self._link = open_link(world, stall_check)
            self._thread = threading.Thread(target=self._run, name="instep", daemon=True)
            self._thread.start()

    def add_group(self, group: Group) -> None:
        """Allow collectives among the ranks of `group` too."""
        self._groups[as_range(group.ranks)] = group

    def remove_group(self, ranks: tuple[int, ...]) -> None:
        """Allow none among these ranks any more. None of theirs is in flight."""
        groups.destroy_group(self._groups.pop(as_range(ranks)))

    def submit(self, task: Task) -> Task:
        """Report that this rank is ready for `task`; returns it at once. From any thread.

        Raises NameInFlightError, NotAMemberError, and NegotiationError after the end.
        """
        request = task.request
        rank = bootstrap.current().rank
        if rank not in request.members:
            raise NotAMemberError(rank, request.members)
        with self._lock:
            if self._end is not None:
                raise self._end
            if request.key in self._tasks:
                line = self._tasks[request.key].request.line
                raise NameInFlightError(
                    f"{request.name} is already in flight on this rank (submitted at {line}). "
                    "Ranks are matched by names: wait for the first one, or give the second a name "
                    "of its own."
                )
            self._tasks[request.key] = task
        self._send(request)  # without the lock: the thread that reads responses needs it
        if self._link is None:
            for response in MessageTable(1).add(0, request, 0.0):
                self._execute(response)
        return task

    def close(self) -> None:
        """Leave; collectives that are in flight on any rank end with an error."""
        if self._link is not None:
            self._send(SHUTDOWN)
            self._thread.join()
            self._link.close()
        for group in self._groups.values():
            groups.destroy_group(group)

    def _send(self, message: Request | None) -> None:
        if self._link is not None:
            with suppress(OSError):  # the coordinator has ended: the thread is told, too
                self._link.channel.send(message)

    def _run(self) -> None:
        """The thread: execute responses until the end."""
        assert self._link is not None
        torch_devices.set_index(self._device)
        end: Response | NegotiationError
        try:
            while isinstance(end := self._link.channel.receive(), Response):
                self._execute(end)
        except (EOFError, OSError):
            end = NegotiationError.rank_left(0, self.world.size)
        self._link.channel.shutdown()
        with self._lock:
            self._end = end
            unfinished, self._tasks = self._tasks, {}
        for task in unfinished.values():
            task.finish(end)

    def _execute(self, response: Response) -> None:
        request, ready = response.request, monotonic_ns()
        task = self._tasks.get(request.key) or Task(request, make_zeros(response))  # it joined
        outcome: tuple[Response, list[Tensor]] | Exception
        if response.error is not None:
            outcome = response.error
        else:
            try:
                with torch.no_grad(), torch_devices.in_stream(task.stream):
                    group = self._groups[request.members]
                    outcome = response, execute(response, task.tensors, task.into, group)
            except InstepError as error:
                outcome = error
            except Exception as error:  # the thread that waits for the task raises it
                outcome = NegotiationError(
                    f"{request.name} broke off: {error}. A rank that ended is the usual cause."
                )
        with self._lock:
            self._tasks.pop(request.key, None)
        if (on_named := recorder.on_named) is not None:  # another thread may end the timeline
            on_named(request.collective, request.name, (task.submitted, ready, monotonic_ns()))
        task.finish(outcome)
