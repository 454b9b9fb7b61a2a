"""The job's secret, which only its processes know, and messages that are signed with it.

The secret is never sent through the connections that it protects (the ranks' store, a network).
`instep run` gives it to its ranks in their environment, which no other user can read; other
launchers' ranks get it from `read_secret`, from a file of mode 0600, or from rank 0 on the same
host.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping

from instep.distributed.errors import AuthenticationError
from instep.process import settings
from instep.process.errors import LaunchVariablesError

MAGIC = b"\0instep\1"
"""How a signed message begins."""
_SIGNATURE_BYTES = 16
_HEADER_BYTES = len(MAGIC) + _SIGNATURE_BYTES
_MIN_LENGTH = 16
"""Characters of a secret that a user may choose."""
SECRET_FILE = "~/.instep/secret"
"""A user's secret for all jobs, in a home directory that all hosts share or copied to each."""
_OPEN_MPI_VARIABLE = "OMPI_MCA_orte_precondition_transports"
"""128 random bits that Open MPI 4's mpirun draws for each job and sets for its ranks."""


def make_secret() -> bytes:
    """A random secret."""
    return os.urandom(32)


def read_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret that this process was given: by `instep run` or the user in INSTEP_SECRET, by the
    user's file, or by Open MPI. None where there is none.

    Raises LaunchVariablesError for one that is too short, or a file that others can read.
    """
    text: str | None = environ.get(settings.SECRET.name)
    if text:
        check_secret_length(text, settings.SECRET.name)
    else:
        text = _read_file(os.path.expanduser(SECRET_FILE)) or environ.get(_OPEN_MPI_VARIABLE)
    return None if text is None else hashlib.sha256(text.encode()).digest()


def _read_file(path: str) -> str | None:
    try:
        text = read_private_file(path).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchVariablesError(
            f"the secret in {path} cannot be used: {error.strerror or error}. "
            "chmod 600 keeps it yours."
        ) from None
    check_secret_length(text, path)
    return text


def check_secret_length(secret: str, where: str) -> None:
    """Raise LaunchVariablesError for a secret that could be guessed."""
    if len(secret) < _MIN_LENGTH:
        raise LaunchVariablesError(
            f"the secret in {where} is too short: it takes {_MIN_LENGTH} characters or more. "
            "`openssl rand -hex 32` makes a good one."
        )


def read_private_file(path: str) -> str:
    """The text of a file that only this user can read or write.

    Raises OSError for any other: a link, a FIFO, another user's, one that others may open.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, errors="replace") as file:
        check_private_file(handle)
        return file.read(65536)


def check_private_file(handle: int) -> None:
    """Raise PermissionError unless this open file is a regular one, and of this user only."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(0, "it is no regular file")
    if found.st_uid != os.getuid():
        raise PermissionError(0, "it belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(0, "other users may open it; its mode must be 0600")


def derive_key(secret: bytes, *purpose: str) -> bytes:
    """A key for one purpose, from which neither the secret nor another key can be computed."""
    return _digest(secret, [part.encode() for part in purpose], 32)


def sign(key: bytes, message: bytes, about: str = "") -> bytes:
    """The message after a signature with `key` of it and of the name that it is `about`."""
    return MAGIC + _digest(key, (about.encode(), message), _SIGNATURE_BYTES) + message


def verify(key: bytes, received: bytes, about: str = "") -> bytes:
    """The message, if its signature is right. Raises AuthenticationError otherwise."""
    message = received[_HEADER_BYTES:]
    expected = MAGIC + _digest(key, (about.encode(), message), _SIGNATURE_BYTES)
    if not hmac.compare_digest(received[:_HEADER_BYTES], expected):
        raise AuthenticationError.not_of_this_job(about)
    return message


def _digest(key: bytes, parts: tuple[bytes, ...] | list[bytes], size: int) -> bytes:
    """BLAKE2b with a key, which is a message authentication code (RFC 7693)."""
    code = hashlib.blake2b(key=key, digest_size=size)
    for part in parts:
        code.update(len(part).to_bytes(8, "little"))
        code.update(part)
    return code.digest()
