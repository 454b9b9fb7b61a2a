"""The gradients of one bucket on their way from autograd over all ranks into `.grad`.

Between CPU ranks of one host a gradient stays where autograd has put it, and is summed there: its
values pass through shared memory chunk by chunk, and nothing is packed. Elsewhere gradients are
packed into one flat tensor, which travels while backward goes on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.training.buckets.codec import BucketCodec
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.in_place_bucket import InPlaceBucket
from instep.training.buckets.layout import BucketLayout
from instep.training.buckets.packed_bucket import PackedBucket


def make_bucket(
    layout: BucketLayout,
    parameters: Mapping[int, Tensor],
    transport: Transport,
    ids: Sequence[int],
    codec: BucketCodec | None,
    *,
    grads_as_views: bool,
) -> GradBucket:
    """An empty bucket for the slots of `layout`.

    Args:
        parameters: by the indices of the slots. One that is gone is missing.
        transport: a bucket is packed unless `transport.in_place`.
        ids: equal on all ranks for the same bucket, and different for different buckets.
        codec: compresses what is sent. A bucket with a codec is always packed.
        grads_as_views: `.grad` becomes a view of the packed bucket, which is then allocated anew
            in each backward (as DDP's gradient_as_bucket_view).
    """
    if transport.in_place and codec is None:
        return InPlaceBucket(layout, parameters, ids)
    return PackedBucket(
        layout,
        parameters,
        ids,
        codec,
        starts_early=not transport.in_place,
        grads_as_views=grads_as_views,
    )


def finish_buckets(
    buckets: Sequence[GradBucket], started: int, transport: Transport, skip: Container[int] = ()
) -> None:
    """Backward has ended, and so many of the buckets have started: start the others, wait for all,
    and write the sums into `.grad`, except of the indices in `skip`."""
    _separate(buckets[started:])
    for bucket in buckets[started:]:
        bucket.start(transport)
    for bucket in buckets:
        bucket.start_second_phase(transport)
    for bucket in buckets:
        bucket.wait()
        bucket.write_grads(skip)


def _separate(buckets: Iterable[GradBucket]) -> None:
    """Before these start: let each gradient have memory of its own. Two parameters that are added
    up have one gradient, and one may be a part of another tensor."""
    storages: set[int] = set()
    for bucket in buckets:
        bucket.separate(storages)
