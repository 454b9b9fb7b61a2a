"""A real sshd on each of the two test hosts, and a client that logs in there without a password."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import networks

PORT = 2222
SECONDS = 30


class SSHServers:
    """A context manager; `path` is a folder for PATH with an `ssh` that knows port and key."""

    def __init__(self, hosts: networks.TwoHosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._stack = ExitStack()
        self.key = folder / "key"
        self.path = folder / "bin"

    def __enter__(self) -> SSHServers:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd wants it
        for name in ("key", "host_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / name]
            subprocess.run(keygen, check=True, stdin=subprocess.DEVNULL)
        client = self._folder / "client"
        known = self._folder / "known_hosts"
        client.write_text(f"UserKnownHostsFile {known}\nIdentityFile {self.key}\nPort {PORT}\n")
        self.path.mkdir()
        program = self.path / "ssh"
        ssh = shlex.join([str(shutil.which("ssh")), "-F", str(client)])
        program.write_text(f'#!/bin/sh\nexec {ssh} "$@"\n')
        program.chmod(0o755)
        with ExitStack() as stack:
            for host, address in enumerate(self._hosts.addresses):
                stack.callback(self._end, self._start(host, address))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, host: int, address: str) -> subprocess.Popen[str]:
        config = self._folder / f"server{host}"
        config.write_text(
            f"ListenAddress {address}\nPort {PORT}\nHostKey {self._folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self.key}.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        server = subprocess.Popen(
            self._hosts.on(host, shutil.which("sshd", path="/usr/sbin"), "-D", "-e", "-f", config),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stderr is not None
        end = time.monotonic() + SECONDS
        while "Server listening" not in (line := server.stderr.readline()):
            if not line or time.monotonic() > end:
                raise RuntimeError(f"sshd does not listen: {line}")
        return server

    @staticmethod
    def _end(server: subprocess.Popen[str]) -> None:
        server.kill()
        server.communicate()
