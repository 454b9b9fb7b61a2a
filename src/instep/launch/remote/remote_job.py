"""A job on several hosts: an agent on each, this host's directly and the others' by ssh."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from instep.distributed.file_limit import allow_open_files
from instep.distributed.identity.authentication import make_secret
from instep.errors import LaunchError
from instep.launch.job import check_memory
from instep.launch.remote.agent import STARTED, AgentRequest
from instep.launch.remote.host_slots import LOOPBACK_NAMES, address_towards, is_this_host
from instep.launch.signals import SignalQueue
from instep.process import python_command, settings

_OF_THIS_HOST = re.compile(r"BASH_FUNC.*|OLDPWD|PWD|SHLVL|_|SSH_.*|HOSTNAME|DISPLAY|XDG_.*|TMPDIR")
"""Variables that mean nothing on another host."""
_FREE_PORT = "import socket as s; x = s.socket(); x.bind(('', 0)); print(x.getsockname()[1])"
_SSH_OPTIONS = ("BatchMode=yes", "StrictHostKeyChecking=accept-new", "ConnectTimeout=30")


_FILES, _FILES_PER_HOST = 64, 6
"""Of this process: its own, and for each host its login's descriptor and pipes."""


@dataclass(frozen=True)
class RemoteOptions:
    """How a job on several hosts is started."""

    slots: Mapping[str, int]
    """The number of ranks of each host, in the order of their ranks."""
    command: tuple[str, ...]
    output: str = "prefix"
    plain: bool = False
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {}
    """Additional environment variables of each rank."""
    max_restarts: int = 0
    min_ranks: int | None = None
    ssh: tuple[str, ...] = ("ssh",)
    """The program that logs in, and options of it."""


def run_on_hosts(options: RemoteOptions) -> int:
    """Run a job and return its exit code. Raises LaunchError, CommandLineError.

    Every host needs the same working directory, interpreter and files, and a login without a
    password from here.
    """
    allow_open_files(_FILES + _FILES_PER_HOST * len(options.slots))
    master, port = _choose_endpoint(options)
    secret = {settings.SECRET.name: str(settings.SECRET) or make_secret().hex()}
    with SignalQueue() as signals:
        agents = []
        try:
            for node, host in enumerate(options.slots):
                is_here = is_this_host(host)  # which may ask a name server: once for each host
                if is_here:
                    check_memory(options.slots[host])  # another host's agent does so there
                request = _request(options, secret, node, master, port, is_here=is_here)
                command = _command_on(host, options, is_here=is_here)
                agents.append(_Agent(host, command, request))
            return _wait(agents, signals)
        finally:
            for agent in agents:
                agent.close()


def _choose_endpoint(options: RemoteOptions) -> tuple[str, int]:
    """An address of the first host that the others reach, and a free port there."""
    first, *others = options.slots
    if not is_this_host(first):
        words = [*_ssh(options), first, shlex.join([sys.executable, "-c", _FREE_PORT])]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        if done.returncode or not done.stdout.strip().isdigit():
            raise _cannot_start(first, done.returncode)
        return first, int(done.stdout)
    far = [host for host in others if not is_this_host(host)]
    master = first
    if first in LOOPBACK_NAMES and far:
        master = address_towards(far[0])
    with socket.create_server((master, 0)) as probe:
        return master, probe.getsockname()[1]


def _cannot_start(host: str, code: int) -> LaunchError:
    return LaunchError(
        f"cannot start ranks on {host} (exit code {code}). It takes a login without a password "
        f"(try: ssh {host} true), and {sys.executable} with instep there."
    )


def _request(
    options: RemoteOptions,
    secret: Mapping[str, str],
    node: int,
    master: str,
    port: int,
    *,
    is_here: bool,
) -> AgentRequest:
    sizes = [*options.slots.values()]
    first = sum(sizes[:node])
    return AgentRequest(
        folder=os.getcwd(),
        environ={
            name: value
            for name, value in (os.environ | secret).items()
            if is_here or not _OF_THIS_HOST.fullmatch(name)
        },
        command=[*options.command],
        size=sizes[node],
        output=options.output,
        plain=options.plain,
        variables={
            str(rank): dict(options.variables(rank)) for rank in range(first, first + sizes[node])
        },
        node=node,
        nodes=len(sizes),
        master=master,
        port=port,
        announces=not is_here,
        max_restarts=options.max_restarts,
        min_ranks=options.min_ranks,
    )


def _command_on(host: str, options: RemoteOptions, *, is_here: bool) -> list[str]:
    agent = python_command("-P", "-m", "instep.launch.remote.agent")
    if is_here:
        return agent
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    variables = [f"{name}={value}" for name, value in path.items()]
    return [*_ssh(options), host, shlex.join(["env", *variables, *agent])]


def _ssh(options: RemoteOptions) -> list[str]:
    """Without questions; a host's key is accepted at the first connection, and must stay."""
    return [*options.ssh, *(word for option in _SSH_OPTIONS for word in ("-o", option))]


class _Agent:
    """The agent of one host, as this process sees it."""

    def __init__(self, host: str, command: Sequence[str], request: AgentRequest) -> None:
        self.host = host
        self.has_started = threading.Event()
        if not request.announces:
            self.has_started.set()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if request.announces else None,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is for this process, which passes it on
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        self._forwarder = threading.Thread(target=self._forward_output, daemon=True)
        self._forwarder.start()
        self._write(request.encode())

    def signal(self, number: int) -> None:
        """Let the host's supervisor get a signal."""
        self._write(bytes([number]))

    def wait(self) -> int:
        """Its exit code; waits for its end."""
        code = self._process.wait()
        self._forwarder.join()
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """End what still runs there: the end of its stdin does so."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._forwarder.join()
        os.close(self.pidfd)

    def _write(self, message: bytes) -> None:
        assert self._process.stdin is not None
        left = memoryview(message)
        with suppress(BrokenPipeError):  # its end is seen elsewhere
            while left:  # a signal ends a long write before its end
                left = left[self._process.stdin.write(left) :]

    def _forward_output(self) -> None:
        if self._process.stdout is None:  # of this host, whose output needs no forwarding
            return
        with self._process.stdout as stdout:
            if stdout.readline() != STARTED:
                return
            self.has_started.set()
            while data := stdout.read(65536):
                with suppress(OSError):  # nobody reads it any more
                    os.write(1, data)


def _wait(agents: Sequence[_Agent], signals: SignalQueue) -> int:
    """Wait for all, and return the first exit code that is not 0. Raises LaunchError."""
    code = 0
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        for agent in agents:
            selector.register(agent.pidfd, selectors.EVENT_READ, agent)
        running = len(agents)
        while running:
            for key, _ in selector.select():
                if key.data is None:
                    for number in signals.pop_all():
                        for agent in agents:
                            agent.signal(number)
                    continue
                agent = key.data
                selector.unregister(agent.pidfd)
                running -= 1
                ended = agent.wait()
                if ended and not agent.has_started.is_set():
                    raise _cannot_start(agent.host, ended)
                code = code or ended
    return code
