"""This host's network interfaces, and the one that leads to the other ranks.

Gloo takes the address of the host's own name, which often is 127.0.1.1, and then ranks of other
hosts wait for 75 seconds; NCCL takes the first interface of its own list. Each reads a variable.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from contextlib import suppress
from ipaddress import IPv6Address, ip_address

LOOPBACK = "lo"
_LOOPBACK_ADDRESS = "127.0.0.1"
IFNAME_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Gloo, NCCL and HCCL (of NPUs) read the name of an interface there, at each new group."""
_SIOCGIFCONF = 0x8912
_ENTRY = struct.Struct("16s4x4s16x")
"""One `struct ifreq` of IPv4: the interface's name, and the address within a sockaddr_in."""
_REMOTE_ADDRESS = "198.51.100.1"
"""Reserved for documentation (RFC 5737). Nothing is sent there: only the route is looked up."""


def addresses() -> list[tuple[str, str]]:
    """(interface, address) for every address of this host; those of IPv4 first."""
    return [*_of_ipv4(), *_of_ipv6()]


def routable_addresses() -> list[str]:
    """The addresses of this host at which other hosts may reach it, the most likely one first."""
    outer = [found for _, found in addresses() if not _is_local(found)]
    routed = _source_address(_REMOTE_ADDRESS)
    return sorted(outer, key=lambda found: found != routed)


def find_interface(host: str | None) -> str | None:
    """The interface that leads to `host`; None where it cannot be found.

    For `host` None, or a name that means the loopback interface here and this host elsewhere
    (Debian writes 127.0.1.1 into /etc/hosts), it is the one that leads out of this host.
    """
    source = None if host is None or is_local_alias(host) else _source_address(host)
    if source is None:
        source = next(iter(routable_addresses()), None)
    return next((name for name, found in addresses() if found == source), None)


def address_of_gloo() -> str:
    """The address of this host at which Gloo listens: that of the interface in its variable, else
    that of the host's name, else that of the loopback interface."""
    if wanted := os.environ.get(IFNAME_VARIABLES[0]):
        first = wanted.split(",")[0]
        of_first = [address for name, address in addresses() if name == first]
        # One of the link alone (fe80::) is the first of IPv6, and means nothing on other hosts.
        outer = [address for address in of_first if not ip_address(address).is_link_local]
        return next(iter(outer + of_first), _LOOPBACK_ADDRESS)
    own = {found for _, found in addresses()}
    with suppress(OSError):
        of_name = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found = (str(address[0]) for *_, address in of_name)
        return next((each for each in found if each in own), _LOOPBACK_ADDRESS)
    return _LOOPBACK_ADDRESS


def is_local_alias(host: str) -> bool:
    """Whether this name means the loopback interface here, and this host elsewhere."""
    with suppress(ValueError):
        ip_address(host)
        return False
    source = _source_address(host)
    return host != "localhost" and source is not None and _is_local(source)


def is_loopback(host: str) -> bool:
    """Whether this means the loopback interface on every host.

    A host's own name may mean it there, and that host elsewhere.
    """
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _source_address(host: str) -> str | None:
    """The address from which this host would send to `host`."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, type_, _, _, address in found:
            with suppress(OSError), socket.socket(family, type_) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def _is_local(address: str) -> bool:
    parsed = ip_address(address)
    return parsed.is_loopback or parsed.is_link_local


def _of_ipv4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(64 * 1024))
    start, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        result = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iP", len(buffer), start))
    filled, _ = struct.unpack("iP", result)
    return [
        (name.rstrip(b"\0").decode(), socket.inet_ntoa(packed))
        for name, packed in _ENTRY.iter_unpack(buffer.tobytes()[:filled])
    ]


def _of_ipv6() -> list[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6") as file:
            fields = [line.split() for line in file]
    except FileNotFoundError:
        return []
    return [(words[-1], str(IPv6Address(bytes.fromhex(words[0])))) for words in fields]
