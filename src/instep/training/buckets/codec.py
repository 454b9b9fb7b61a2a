"""How the flat tensor of a bucket is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.pending import Pending


class BucketCodec:
    """Sends the flat tensor of a bucket, which becomes its sum over the ranks.

    Behind the gradients it holds one flag per slot, then the bucket's checksum. This class sends it
    as it is; subclasses compress it.
    """

    _pending: Pending | None = None

    def start(self, flat: Tensor, transport: Transport) -> None:
        """Start the sum. Collective."""
        self._pending = transport.all_reduce(as_real(flat), "sum")

    def start_second_phase(self, flat: Tensor, transport: Transport) -> None:
        """Send what depends on the first sums, if anything does. Collective."""

    def wait(self, flat: Tensor) -> None:
        """Wait, and leave the sums in `flat`."""
        assert self._pending is not None
        self._pending.wait()

    def reset(self) -> None:
        """Forget this backward, which may have been interrupted."""
        self._pending = None


def as_real(tensor: Tensor) -> Tensor:
    """A tensor of the same memory that is real: complex numbers as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
