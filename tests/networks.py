"""Test hosts on this machine: network namespaces, joined by cables, each with a name."""

from __future__ import annotations

import shlex
import subprocess
import uuid
from pathlib import Path
from typing import Self

UNTIL_ALL_HAVE_ENDED = "while kill -0 -1 2>/dev/null; do sleep 0.05; done"


def address(host: int) -> str:
    """That of a host."""
    return f"10.77.0.{host + 1}"


class Hosts:
    """h0, h1, ...: loopback and one interface each, 10.77.0.1 and on. A context manager.

    Each numbers its processes by itself, so they share no memory. `rate` is that of each cable.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self._rate = rate
        mark = uuid.uuid4().hex[:8]
        self._namespaces = [f"instep-{mark}-{k}" for k in range(count)]
        self._switch = f"instep-{mark}-switch"
        self.addresses = [address(k) for k in range(count)]
        self.interfaces = [f"cable{k}" for k in range(count)]

    def __enter__(self) -> Self:
        for namespace in self._namespaces:
            _ip("netns", "add", namespace)
        self._join()
        for namespace, interface, own in zip(
            self._namespaces, self.interfaces, self.addresses, strict=True
        ):
            _ip("-n", namespace, "address", "add", f"{own}/24", "dev", interface)
            for link in ("lo", interface):
                _ip("-n", namespace, "link", "set", link, "up")
            if self._rate is not None:
                shaped = ["tbf", "rate", self._rate, "burst", "1mb", "latency", "50ms"]
                traffic = ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root"]
                subprocess.run([*traffic, *shaped], check=True, capture_output=True)
        return self

    def _join(self) -> None:
        """Lead the cable of each host to a switch."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for namespace, interface in zip(self._namespaces, self.interfaces, strict=True):
            _ip("link", "add", interface, "netns", namespace,
                "type", "veth", "peer", "name", interface, "netns", self._switch)  # fmt: skip
            _ip("-n", self._switch, "link", "set", interface, "master", "switch", "up")

    def __exit__(self, *_: object) -> None:
        for namespace in self._namespaces:
            _ip("netns", "delete", namespace)
        self._leave()

    def _leave(self) -> None:
        _ip("netns", "delete", self._switch)

    def on(self, host: int, *command: object) -> list[str]:
        """The command line that runs `command` on one of them."""
        # The first process of a host ignores signals, and ends the others when it ends.
        named = f'hostname h{host}; "$@"; code=$?; {UNTIL_ALL_HAVE_ENDED}; exit $code'
        inside = ["ip", "netns", "exec", self._namespaces[host], "unshare", "--uts"]
        apart = ["--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*inside, *apart, "sh", "-c", named, "sh", *map(str, command)]

    def login(self, folder: Path) -> str:
        """A program that runs a command line on one of them, in the manner of ssh."""
        agent = folder / "login"
        cases = [
            f'{own}) exec {shlex.join(self.on(host, "sh", "-c"))} "$*" ;;'
            for host, own in enumerate(self.addresses)
        ]
        lines = ["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", "exit 255"]
        agent.write_text("\n".join([*lines, ""]))
        agent.chmod(0o755)
        return str(agent)


class TwoHosts(Hosts):
    """h0 and h1, joined by one cable."""

    def __init__(self, rate: str | None = None) -> None:
        super().__init__(2, rate)

    def _join(self) -> None:
        first, second = self._namespaces
        _ip("link", "add", "cable0", "netns", first,
            "type", "veth", "peer", "name", "cable1", "netns", second)  # fmt: skip

    def _leave(self) -> None:
        pass

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self._namespaces[1], "link", "set", "cable1", "down")


def missing() -> str | None:
    """Why there can be none here, if so."""
    try:
        with TwoHosts() as hosts:
            subprocess.run(hosts.on(0, "true"), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        return f"network namespaces cannot be made here ({said.decode().strip()})"
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
