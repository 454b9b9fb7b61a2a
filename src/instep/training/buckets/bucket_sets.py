"""The buckets of some parameters, which differ with what is trained of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

from torch import nn

from instep.distributed.communication.transport import Transport
from instep.process.torch_private.autograd import hooks_of, later_hooks_of
from instep.training.buckets.bucket_sums import make_bucket
from instep.training.buckets.compression import Compression, make_codec
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.layout import plan_tensors

MAX_BUCKET_SETS = 2
"""A reducer keeps the buckets of this many sets of trained parameters, those used last: as many as
a script has that trains two of them by turns. Each set has flat tensors as large as its
gradients."""
_TYPE = attrgetter("requires_grad", "dtype", "device")


class BucketSet:
    """The buckets of one set of trained parameters, and the bucket of each parameter."""

    def __init__(self, buckets: Sequence[GradBucket]) -> None:
        self.buckets = buckets
        self.bucket_of = {slot.index: bucket for bucket in buckets for slot in bucket.layout.slots}


class BucketSets:
    """The buckets of some parameters, for each of the sets of them that are trained by turns.

    Args:
        parameters: in the order in which backward reaches them.
        transport: of the buckets.
        number: equal on all ranks for these parameters, and different for others.
        compression: of what is sent.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        number: int,
        compression: Compression,
    ) -> None:
        self._parameters, self._transport = parameters, transport
        self._number, self._compression = number, compression
        self._sets: dict[tuple[object, ...], BucketSet] = {}
        """Those used last come last."""

    def choose(self, sparse: Collection[int]) -> BucketSet:
        """The buckets for what is trained now, without `sparse`."""
        # In every step, for every parameter: loops in C, not in Python.
        key = (
            tuple(map(_TYPE, self._parameters)),
            tuple(map(len, map(hooks_of, self._parameters))),
            tuple(map(bool, map(later_hooks_of, self._parameters))),
            frozenset(sparse),
        )
        chosen = self._sets.pop(key, None)
        if chosen is None:
            while len(self._sets) >= MAX_BUCKET_SETS:  # before new ones take their memory
                del self._sets[next(iter(self._sets))]
            chosen = BucketSet(self._make(sparse))
        self._sets[key] = chosen
        return chosen

    def _make(self, sparse: Collection[int]) -> list[GradBucket]:
        trained = {
            index: parameter
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad and not (index in sparse or has_user_hooks(parameter))
        }
        buckets = []
        for layout in plan_tensors(trained):
            members = {slot.index: trained[slot.index] for slot in layout.slots}
            codec = make_codec(layout, members, self._compression)
            ids = (self._number, *members)
            bucket = make_bucket(layout, members, self._transport, ids, codec, grads_as_views=False)
            buckets.append(bucket)
            bucket.title = f"gradients, bucket {len(buckets)}"
        return buckets


def has_user_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user has hooks on this gradient, beside ours."""
    return len(hooks_of(parameter)) > 1 or bool(later_hooks_of(parameter))
