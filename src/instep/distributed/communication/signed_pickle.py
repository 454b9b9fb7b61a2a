"""Python values as bytes that travel between ranks: pickled, behind a mark of this job's key.

Whoever may write a pickle may run code where it is read. What a rank reads comes over connections
that Gloo or NCCL have opened without asking who is there, so it is unpickled only if a rank of this
job has written it.
"""

from __future__ import annotations

import pickle
from typing import Any

from instep.distributed.identity.authentication import derive_key, sign, verify
from instep.distributed.rendezvous import bootstrap

_WHAT = "an object of another rank"


def dumps(value: object) -> bytes:
    """The value. Raises what pickle raises for one that cannot travel."""
    return sign(_key(), pickle.dumps(value), _WHAT)


def loads(received: bytes | memoryview) -> Any:
    """The value that a rank of this job has sent. Raises AuthenticationError for anything else."""
    return pickle.loads(verify(_key(), bytes(received), _WHAT))


def _key() -> bytes:
    return derive_key(bootstrap.key(), "objects")
