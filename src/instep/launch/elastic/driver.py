"""The driver of an elastic job: starts ranks, chooses each world, and tells ranks of changes."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from instep.distributed.identity.launchers import ELASTIC_FD
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.distributed.rendezvous.port_file import LOOPBACK_HOST
from instep.distributed.watchdog.connection import Connection
from instep.launch.elastic.hosts import INTERVAL, HostDiscovery, HostTable, Slot
from instep.launch.elastic.worlds import plan_slots, rank_variables
from instep.launch.errors import StartError
from instep.launch.multi_node.hosts import ONE_NODE, join_hosts
from instep.launch.ranks.output import choose_output
from instep.launch.ranks.rank_process import RankProcess, RankSpec, start_rank
from instep.launch.ranks.rank_variables import rank_environment
from instep.launch.ranks.reaper import Reaper, end_ranks
from instep.launch.signals import TERMINATION_SIGNALS, SignalQueue
from instep.process import print_line, settings, storage
from instep.process.exit_status import format_ranks, shell_exit_code
from instep.process.failures.last_position import LastPosition
from instep.process.failures.record import Failure, RankExit

START_SECONDS = 600.0
"""For the ranks of a world to ask for it, once there are enough slots."""
LEAVE_SECONDS = 30.0
"""For a rank that is not needed any more to end by itself."""
TERMINATE_SECONDS = 5.0
"""For ranks to end after SIGTERM."""


@dataclass(frozen=True)
class ElasticOptions:
    """The options of an elastic job."""

    size: int
    """The number of slots with which the job begins; more are used if there are more."""
    least: int
    """The smallest number of ranks that go on."""
    most: int | None = None
    """The largest number of ranks; None: one for each slot."""
    reset_limit: int | None = None
    """How many worlds there may be after the first; None: any number."""
    timeout: float = 600.0
    """Seconds for which the job waits for slots."""
    cooldown: tuple[float, float] | None = None
    """See HostTable."""


@dataclass(eq=False)
class _Member:
    """A rank's process."""

    slot: Slot
    process: RankProcess
    connection: Connection
    file: Path
    name: int
    """The rank for which it was started, as its lines of output begin."""
    rank: int | None = None
    """In the present world."""
    port: int | None = None
    """Where it would listen as rank 0 of the next world; None while it does not wait for one."""
    kill_at: float = float("inf")
    """It is not needed any more, and gets SIGKILL then."""

    def is_leaving(self) -> bool:
        """Whether it is not needed any more."""
        return self.kill_at < float("inf")

    def leave_by(self, deadline: float) -> None:
        """Let a member that is not needed any more end by itself until then."""
        self.kill_at = deadline


class Driver:
    """Runs one job. Its methods run in one thread, after each event that the selector reports."""

    def __init__(
        self,
        command: tuple[str, ...],
        output: str,
        variables: Mapping[str, str],
        options: ElasticOptions,
        find_hosts: Callable[[str], dict[str, int]],
    ) -> None:
        """`find_hosts` is called every second, with the job's name. Raises what it raises."""
        settings.check_variables()
        self._command, self._variables, self._options = command, dict(variables), options
        self._output = choose_output(output)
        job = join_hosts(ONE_NODE, options.size, JobFingerprint.of_command(command))
        assert job.store is not None
        job.store.close()  # each world meets at a port of its rank 0's
        self._job = replace(job, store=None)
        self._hosts = HostTable(options.least, options.cooldown)
        self._discovery = HostDiscovery(partial(find_hosts, self._job.name))
        self._hosts.update(self._discovery.found)
        self._selector = selectors.DefaultSelector()
        self._members: list[_Member] = []
        self._started: list[RankProcess] = []
        self._worlds = 0
        self._changes = 0
        self._known_slots: set[Slot] = set()
        """Those that the ranks know to be free."""
        self._begin_forming()
        self._has_finished = False
        """Whether a rank has come to the end of its program."""
        self._failures: list[Failure] = []
        """Since the last world was formed, with the rank for which the process was started."""
        self._all_failures: list[Failure] = []
        self._end: tuple[int, str] | None = None
        """The exit code and a line for stderr, once the job is to end."""

    def run(self) -> int:
        """Run the job to its end and return the exit code. No process of it is left then."""
        with SignalQueue() as signals, storage.make_job_folder(self._options.size) as files:
            self._files, self._reaper = Path(files), Reaper(self._job.name, Path(files))
            self._selector.register(
                signals, selectors.EVENT_READ, partial(self._on_signal, signals)
            )
            self._selector.register(self._discovery, selectors.EVENT_READ, self._on_hosts)
            try:
                self._form_world()
                while self._end is None and (self._members or not self._has_begun()):
                    for key, _ in self._selector.select(INTERVAL):
                        key.data()
                    self._on_time()
                code, line = self._end or self._conclude()
                self._terminate()
            finally:
                self._discovery.stop()
                end_ranks((rank.pid for rank in self._started), self._job.name)
                for rank in self._started:
                    rank.reap()
                self._reaper.stop()
                self._discovery.close()
            self._output.finish(self._all_failures)
        sys.stderr.write(line)
        sys.stderr.flush()
        return code

    def _has_begun(self) -> bool:
        """Whether ranks have met, or one has ended without it."""
        return self._has_finished or self._worlds > 0

    def _conclude(self) -> tuple[int, str]:
        """All ranks have ended by themselves."""
        if not self._failures:
            lost = "" if self._has_finished else "instep: no rank is left: all hosts are gone.\n"
            return (0 if self._has_finished else 1), lost
        first = min(self._failures, key=lambda each: (each.is_consequence, each.time, each.rank))
        line = f"instep: rank {first.rank} {first}, and no rank is left that could go on\n"
        return shell_exit_code(first.code), line + first.text

    # ------------------------------------------------------------------------------- worlds

    def _begin_forming(self) -> None:
        self._forming = True
        self._forming_since = time.monotonic()
        self._wait_until = self._forming_since + self._options.timeout

    def _slots_needed(self) -> int:
        return self._options.least if self._worlds else self._options.size

    def _form_world(self) -> None:
        """Form the next world if all its ranks wait for it; first start those that are missing."""
        now = time.monotonic()
        living = {m.slot: m.rank for m in self._members if not m.is_leaving()}
        free = self._hosts.slots(now)
        if self._has_finished:  # ranks that meet again get no new ones
            free = [slot for slot in free if slot in living]
        chosen = plan_slots(free, living, self._options.most)
        for member in self._members:
            if member.port is not None and member.slot not in chosen:
                self._dismiss(member)
        if len(chosen) < self._slots_needed() and not self._has_finished:
            return
        for rank, slot in enumerate(chosen):
            if slot not in living:
                self._start(slot, rank, len(chosen))
        by_slot = {m.slot: m for m in self._members if not m.is_leaving()}
        world = [by_slot[slot] for slot in chosen]
        if world and all(member.port is not None for member in world):
            self._begin_world(world, set(free))

    def _begin_world(self, world: list[_Member], free: set[Slot]) -> None:
        limit = self._options.reset_limit
        if limit is not None and self._worlds > limit:
            text = f"the ranks have met again {limit} times, and --reset-limit allows no more"
            self._end = 1, f"instep: {text}.\n" + "".join(f.text for f in self._failures)
            return
        if self._worlds:
            kept = format_ranks(m.rank for m in world if m.rank is not None)
            new = sum(member.rank is None for member in world)
            joined = f", and {new} that joined" if new else ""
            print_line(f"the job goes on with {len(world)} ranks: {kept} of before{joined}")
        port = world[0].port
        for rank, member in enumerate(world):
            variables = rank_variables(rank, len(world), member.slot[0])
            variables |= {"MASTER_ADDR": LOOPBACK_HOST, "MASTER_PORT": str(port)}
            member.connection.send("world", variables=variables)
            member.rank, member.port = rank, None
        self._worlds += 1
        self._forming = False
        self._failures.clear()
        self._known_slots = free

    def _dismiss(self, member: _Member) -> None:
        """Let a member end that waits for a world in which it has no slot."""
        member.connection.send("leave")
        member.port = None
        member.leave_by(time.monotonic() + LEAVE_SECONDS)

    def _start(self, slot: Slot, rank: int, size: int) -> None:
        number = len(self._started)
        ours, theirs = socket.socketpair()
        environ = rank_environment(
            os.environ,
            replace(self._job, sizes=(size,)),
            local_rank=rank,
            failure_file=self._file(number),
            store_fd=None,
        )
        environ |= {settings.WATCH.name: "off"} | self._variables
        environ |= rank_variables(rank, size, slot[0])
        environ |= {ELASTIC_FD: str(theirs.fileno()), "HOROVOD_ELASTIC": "1"}
        with theirs:
            try:
                process = start_rank(
                    RankSpec(
                        rank, self._command, environ, self._output.streams(rank), theirs, plain=True
                    )
                )
            except OSError as error:
                raise StartError(rank, size, error.strerror or str(error)) from None
        self._started.append(process)
        self._reaper.add(process.pid)
        self._output.start()
        process.send_go()
        member = _Member(slot, process, Connection(ours), self._file(number), rank)
        self._members.append(member)
        self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._on_exit, member))
        self._selector.register(
            member.connection, selectors.EVENT_READ, partial(self._on_message, member)
        )

    def _file(self, number: int) -> Path:
        return self._files / f"rank{number}"

    # ------------------------------------------------------------------------------- events

    def _on_message(self, member: _Member) -> None:
        if member not in self._members:  # it has ended, in the same turn of the selector
            return
        messages = member.connection.recv()
        if messages is None:
            self._selector.unregister(member.connection)
            return
        for message in messages:
            if message["type"] == "join" and not member.is_leaving():
                member.port = message["port"]
                if not self._forming:
                    self._begin_forming()
                self._form_world()

    def _on_exit(self, member: _Member) -> None:
        self._selector.unregister(member.process.pidfd)
        if member.connection in self._selector.get_map():
            self._selector.unregister(member.connection)
        member.connection.close()
        self._members.remove(member)
        end = member.process.record_end(None)
        if member.is_leaving():
            return
        if end.code == 0:
            self._has_finished = True
        else:
            self._on_failure(member, end)
        if self._forming and self._end is None and self._members:
            self._form_world()

    def _on_failure(self, member: _Member, end: RankExit) -> None:
        code, seen = end.code, LastPosition(member.file)
        failure = Failure.read(member.file) or Failure(
            member.name, end.time, code, text=seen.describe(code, end.monotonic)
        )
        failure = replace(failure, rank=member.name)
        self._failures.append(failure)
        self._all_failures.append(failure)
        if not self._worlds:
            text = f"rank {member.name} {failure} before the ranks had met"
            self._end = shell_exit_code(code), f"instep: {text}\n{failure.text}"
            return
        now = time.monotonic()
        may_go_on = failure.is_consequence or self._hosts.exclude(member.slot, now)
        free = self._hosts.slots(now)
        self._known_slots &= set(free)
        if not may_go_on:
            text = f"rank {member.name} {failure}, as before in the same slot"
            self._end = shell_exit_code(code), f"instep: {text}\n{failure.text}"
            return
        host = member.slot[0]
        what = ""
        if member.slot not in free:
            is_host = all(slot[0] != host for slot in free)
            what = f"; {host if is_host else f'this slot of {host}'} gets no rank"
            what += " for a while" if self._options.cooldown else " any more"
        line = f"instep: rank {member.name} on {host} {failure}{what}\n{failure.text}"
        print(line.rstrip(), file=sys.stderr, flush=True)
        for other in self._members:
            if other.slot not in free and not other.is_leaving():
                other.process.signal(signal.SIGTERM)
                other.leave_by(now + TERMINATE_SECONDS)

    def _on_hosts(self) -> None:
        self._hosts.update(self._discovery.receive())
        if self._forming:
            self._form_world()

    def _on_time(self) -> None:
        """Once a second, and after each event."""
        now = time.monotonic()
        for member in self._members:
            if member.kill_at <= now:
                member.process.signal(signal.SIGKILL)
        if self._forming:
            self._form_world()  # excluded slots may be free again
            needed = self._slots_needed()
            if len(self._hosts.slots(now)) >= needed:  # ranks that start are waited for longer
                self._wait_until = max(self._wait_until, self._forming_since + START_SECONDS)
            if self._forming and now > self._wait_until:
                waiting = sum(member.port is not None for member in self._members)
                text = (
                    f"instep: after {self._options.timeout:.0f} seconds the hosts have "
                    f"{len(self._hosts.slots(now))} slots, and {waiting} ranks wait; the job "
                    f"needs {needed}. --elastic-timeout sets how long it waits.\n"
                )
                self._end = 1, text
            return
        self._report_changes(set(self._hosts.slots(now)))

    def _report_changes(self, free: set[Slot]) -> None:
        """Tell the ranks of slots for which they should meet again."""
        if free == self._known_slots or self._has_finished:
            return
        occupied = {member.slot for member in self._members if member.rank is not None}
        most = self._options.most or len(free)
        removed = bool(occupied - free)
        added = bool(free - self._known_slots) and len(occupied & free) < most
        self._known_slots = free
        if removed or added:
            self._changes += 1
            for member in self._members:
                member.connection.send("hosts", time=self._changes, removed=removed, added=added)

    def _on_signal(self, signals: SignalQueue) -> None:
        for number in signals.pop_all():
            if number in TERMINATION_SIGNALS:
                self._end = 128 + number, ""

    def _terminate(self) -> None:
        """Ask the ranks that still run to end."""
        deadline = time.monotonic() + TERMINATE_SECONDS
        for member in self._members:
            member.process.signal(signal.SIGTERM)
        for member in self._members:
            left = max(0.0, deadline - time.monotonic())
            with selectors.DefaultSelector() as selector:
                selector.register(member.process.pidfd, selectors.EVENT_READ)
                selector.select(left)
