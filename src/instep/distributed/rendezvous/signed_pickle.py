"""Python values as pickles that are signed with this job's key.

The writer of a pickle can run code in the process that reads it, and Gloo and NCCL open their
connections without authentication. So a pickle is read only if a rank of this job has signed it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from instep.distributed.identity import torch_devices
from instep.distributed.identity.authentication import derive_key, sign, verify
from instep.distributed.rendezvous import bootstrap

_NAME = "an object of another rank"


def dumps(value: object) -> bytes:
    """The signed pickle of a value. Raises what pickle.dumps raises."""
    return sign_pickle(pickle.dumps(value))


def sign_pickle(content: bytes) -> bytes:
    """A pickle as `loads` reads it."""
    return sign(_key(), content, _NAME)


def loads(received: bytes | memoryview) -> Any:
    """The value that a rank of this job has sent. Raises AuthenticationError for anything else.

    Tensors of the sender's accelerator arrive on this rank's own.
    """
    return unpickle(verify(_key(), bytes(received), _NAME))


def unpickle(content: bytes) -> Any:
    """The value of a pickle that came inside of one that was signed."""
    return _OwnDeviceUnpickler(io.BytesIO(content)).load()


def dumps_tensor(value: object) -> Tensor:
    """The signed pickle as a tensor of bytes on the CPU."""
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def loads_tensor(received: Tensor) -> Any:
    """The value of a tensor that `dumps_tensor` has made on a rank of this job."""
    return loads(received.cpu().numpy().data)


class _OwnDeviceUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_storage = (module, name) == ("torch.storage", "_load_from_bytes")
        return _load_storage if is_storage else super().find_class(module, name)


def _load_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location=_restore, weights_only=False)


def _restore(storage: Any, location: str) -> Any:
    """Else it would go to the device of the sender's number, which is another rank's."""
    kind = location.partition(":")[0]
    if kind == torch_devices.accelerator_type():
        location = str(torch_devices.current_device(kind))
    return torch.serialization.default_restore_location(storage, location)


def _key() -> bytes:
    return derive_key(bootstrap.key(), "objects")
