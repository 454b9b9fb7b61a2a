"""The hosts of an elastic job: how they are found, and which of their slots may have a rank."""

from __future__ import annotations

import os
import random
import shlex
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from instep.distributed.identity.launchers import JOB
from instep.errors import CommandLineError
from instep.process import print_line

INTERVAL = 1.0
"""Seconds between two runs of the script that finds the hosts."""
TIMEOUT = 60.0
"""Seconds after which a run of it has failed."""
ATTEMPTS = 3
"""After so many failures in a slot that the job cannot do without, the job ends."""
Slot = tuple[str, int]
"""A host's name, and the number of one of its slots. The rank that it has may change."""


class HostTable:
    """The slots, those of hosts that were found first before others, and without excluded ones.

    A failure excludes its host where the other hosts have enough slots, otherwise its slot only,
    or nothing if the job needs even this slot. Times are seconds of a clock of the caller's.
    """

    def __init__(self, least: int, cooldown: tuple[float, float] | None = None) -> None:
        """`least`: the ranks that the job needs. `cooldown`: the shortest and the longest time for
        which a failure excludes; None: for ever."""
        self._least = least
        self._cooldown = cooldown
        self._hosts: dict[str, int] = {}
        self._excluded_until: dict[str | Slot, float] = {}
        self._failures: Counter[str | Slot] = Counter()

    def update(self, found: Mapping[str, int]) -> None:
        """Note the hosts that there are now, with their slots."""
        kept = [host for host in self._hosts if host in found]
        self._hosts = {host: found[host] for host in (*kept, *found)}

    def slots(self, now: float) -> list[Slot]:
        """All that may have a rank."""
        return [
            (host, index)
            for host, count in self._hosts.items()
            for index in range(count)
            if self._is_free(host, now) and self._is_free((host, index), now)
        ]

    def exclude(self, slot: Slot, now: float) -> bool:
        """A rank has failed in this slot. False if the job should end, because it always does."""
        free = self.slots(now)
        elsewhere = [other for other in free if other[0] != slot[0]]
        others = [other for other in free if other != slot]
        what: str | Slot = slot[0] if len(elsewhere) >= self._least else slot
        self._failures[what] += 1
        if len(others) < self._least and self._cooldown is None:
            return self._failures[what] < ATTEMPTS
        self._excluded_until[what] = now + self._delay(self._failures[what])
        return True

    def _delay(self, failures: int) -> float:
        """Doubles with each failure, and has a random part."""
        if self._cooldown is None:
            return float("inf")
        shortest, longest = self._cooldown
        delay: float = shortest * (2.0**failures + random.random())
        return max(shortest, min(longest, delay))

    def _is_free(self, what: str | Slot, now: float) -> bool:
        return self._excluded_until.get(what, 0.0) <= now


class HostDiscovery:
    """Runs the user's script every second, in a thread. `fileno` is readable after changes."""

    def __init__(self, find: Callable[[], dict[str, int]]) -> None:
        """`find` is called once here. Raises what it raises."""
        self.found = find()
        """The hosts and their slots, as of the last run."""
        self._find = find
        self._receiver, self._sender = socket.socketpair()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep hosts", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For a selector."""
        return self._receiver.fileno()

    def receive(self) -> dict[str, int]:
        """The present hosts; waits for a change."""
        self._receiver.recv(4096)
        return self.found

    def stop(self) -> None:
        """Run the script no more, and heed no more what becomes of it."""
        self._stopped.set()

    def close(self) -> None:
        """End the thread, after the run of the script that is under way."""
        self.stop()
        self._thread.join()
        self._receiver.close()
        self._sender.close()

    def _run(self) -> None:
        problem = ""
        while not self._stopped.wait(INTERVAL):
            try:
                found, before = self._find(), problem
                problem = ""
            except CommandLineError as error:
                found, before, problem = self.found, problem, str(error)
            if self._stopped.is_set():
                return
            if problem and problem != before:
                print_line(f"{problem} The hosts stay as they are.")
            if list(found.items()) != list(self.found.items()):
                self.found = found
                self._sender.send(b".")


def run_script(script: str, slots: int | None, job: str) -> list[tuple[str, str]]:
    """The hosts and their slots in the lines `host:slots` that a script prints.

    `slots` are those of a host without a number. The script's processes belong to the job, and end
    with it. Raises CommandLineError if the script fails.
    """
    try:
        done = subprocess.run(
            shlex.split(script),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=os.environ | {JOB: job},
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise CommandLineError(f"--host-discovery-script {script} does not run: {error}.") from None
    if done.returncode:
        raise CommandLineError(
            f"--host-discovery-script {script} ended with exit code {done.returncode}: "
            f"{done.stderr.strip()[-200:] or 'it printed no reason'}."
        )
    lines = (line.strip().rpartition(":") for line in done.stdout.splitlines() if line.strip())
    default = str(slots or 1)
    return [(host, count) if colon else (count, default) for host, colon, count in lines]
