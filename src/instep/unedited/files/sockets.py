"""The replacements of functions of sockets, which are bound to a file or to a port of this rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from instep.process.patching import Function
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.os_functions import current_files, files_for, path_to_read

_LOCAL_HOSTS = {"", "localhost", "127.0.0.1", "0.0.0.0", "::1", "::", socket.gethostname()}
_MAX_PATH_BYTES = 107
"""Of a Unix socket's address."""


def socket_bind(original: Function, self: Any, address: Any) -> Any:
    """For bind: a Unix socket in a file of this rank, a server at a port of this rank."""
    if not _is_unix_path(self, address):
        return _bind_port(original, self, address)

    files = files_for(address)

    def bind(path: Any) -> Any:
        result = original(self, path)
        files.bound_sockets[os.fsdecode(path)] = os.fsdecode(address)
        return result

    return _call_with_short_path(files.new_location(address), bind)


def socket_name(original: Function, self: Any) -> Any:
    """For getsockname and getpeername."""
    name = original(self)
    if isinstance(name, str):
        return current_files().bound_sockets.get(name, name)
    return _address_here(self, name, "script-port")


def socket_connect(original: Function, self: Any, address: Any) -> Any:
    """For connect and connect_ex: what this rank has bound, where it has bound it."""
    if not _is_unix_path(self, address):
        return original(self, _address_here(self, address))
    return _call_with_short_path(path_to_read(address), lambda path: original(self, path))


def socket_sendto(original: Function, self: Any, data: Any, *flags_and_address: Any) -> Any:
    """For sendto: as for connect."""
    *flags, address = flags_and_address

    def send(here: Any) -> Any:
        return original(self, data, *flags, here)

    if not _is_unix_path(self, address):
        return send(_address_here(self, address))
    return _call_with_short_path(path_to_read(address), send)


def socket_recvfrom(original: Function, self: Any, *args: Any) -> Any:
    """For recvfrom and recvfrom_into: the sender at the address that the script knows."""
    received, address = original(self, *args)
    return received, _address_here(self, address, "script-port")


def _bind_port(original: Function, self: Any, address: Any) -> Any:
    """Bind a port that the script names: on rank 0 that one, on the others any that is free.

    All ranks of a host would ask for the same one, and only the first would get it.
    """
    if not (_has_port(self, address) and address[1] and current_files().layers):
        return original(self, address)
    host, port, *rest = address
    known = _port_here(port, "port")
    result = original(self, (host, 0 if known == port else known, *rest))
    if known == port:
        with bypass_overlay():
            own = self.getsockname()[1]
            os.symlink(str(port), _port_link(own, "script-port"))
            os.symlink(str(own), _port_link(port, "port"))
    return result


def _address_here(self: Any, address: Any, kind: str = "port") -> Any:
    """Where the processes of this rank find what the script expects at an address; with the kind
    "script-port" the opposite."""
    local = _has_port(self, address) and address[0] in _LOCAL_HOSTS and current_files().layers
    if not local:
        return address
    host, port, *rest = address
    return (host, _port_here(port, kind), *rest)


def _port_here(port: int, kind: str) -> int:
    """The port that a process of this rank has got in place of `port`; else `port` itself."""
    try:
        with bypass_overlay():
            return int(os.readlink(_port_link(port, kind)))
    except OSError:
        return port


def _port_link(port: int, kind: str) -> Path:
    """A link in the rank's directory, which its processes share, to the number of a port."""
    return Path(current_files().layers[0].directory).parents[1] / f"{kind}-{port}"


def _has_port(self: Any, address: Any) -> bool:
    is_internet = self.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and isinstance(address, tuple) and len(address) > 1


def _is_unix_path(self: Any, address: Any) -> bool:
    is_path = self.family == socket.AF_UNIX and isinstance(address, str | bytes | os.PathLike)
    return is_path and os.fsencode(address)[:1] != b"\0"


def _call_with_short_path(location: Any, function: Function) -> Any:
    """Call `function` with the location of a socket, shortened if it is too long for an address."""
    directory, name = os.path.split(os.fsdecode(location))
    if len(os.fsencode(location)) < _MAX_PATH_BYTES:
        return function(location)
    with bypass_overlay():
        fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        return function(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)
