"""Which of this host's interfaces leads to the other ranks.

Gloo takes the address of the host's own name, which often is 127.0.1.1, and then the far ranks
wait for 75 seconds; NCCL takes the first interface that it likes. Both can be told.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import IPv6Address, ip_address

LOOPBACK = "lo"
IFNAME_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where Gloo and NCCL look for the name of an interface, at each new group."""
_SIOCGIFCONF = 0x8912
_ENTRY = struct.Struct("16s4x4s16x")
"""One `struct ifreq` of IPv4: the interface's name, and the address within a sockaddr_in."""
_FAR_AWAY = "198.51.100.1"
"""Reserved for documentation (RFC 5737). Nothing is sent there: only the routes are asked."""


def addresses() -> list[tuple[str, str]]:
    """(interface, address) for every address of this host; those of IPv4 first."""
    return [*_of_ipv4(), *_of_ipv6()]


def routable_addresses() -> list[str]:
    """The addresses of this host at which other hosts may reach it, the most likely one first."""
    outer = [found for _, found in addresses() if not _stays_here(found)]
    routed = _source_towards(_FAR_AWAY)
    return sorted(outer, key=lambda found: found != routed)


def find_interface(host: str | None) -> str | None:
    """The interface through which `host` is reached, and where `host` is this one reaches it.

    None for `host`, or a name that means the loopback interface here and this host elsewhere
    (Debian writes 127.0.1.1 into /etc/hosts): the one that leads out of this host. None as an
    answer: it cannot be told.
    """
    source = None if host is None or is_local_alias(host) else _source_towards(host)
    if source is None:
        source = next(iter(routable_addresses()), None)
    return next((name for name, found in addresses() if found == source), None)


def is_local_alias(host: str) -> bool:
    """Whether this is a name that leads to the loopback interface here, and hither elsewhere."""
    with suppress(ValueError):
        ip_address(host)
        return False
    source = _source_towards(host)
    return host != "localhost" and source is not None and _stays_here(source)


def is_loopback(host: str) -> bool:
    """Whether this means the loopback interface wherever it is said, so only to one host's ranks.

    A host's own name may mean it there, and that host elsewhere.
    """
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _source_towards(host: str) -> str | None:
    """The address that this host would have in talks with `host`."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in found:
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def _stays_here(address: str) -> bool:
    parsed = ip_address(address)
    return parsed.is_loopback or parsed.is_link_local


def _of_ipv4() -> list[tuple[str, str]]:
    room = array.array("B", bytes(64 * 1024))
    start, _ = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        told = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iP", len(room), start))
    filled, _ = struct.unpack("iP", told)
    return [
        (name.rstrip(b"\0").decode(), socket.inet_ntoa(packed))
        for name, packed in _ENTRY.iter_unpack(room.tobytes()[:filled])
    ]


def _of_ipv6() -> list[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6") as file:
            fields = [line.split() for line in file]
    except FileNotFoundError:
        return []
    return [(words[-1], str(IPv6Address(bytes.fromhex(words[0])))) for words in fields]
