"""Gradients averaged over the ranks, during backward or when asked."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.tensors import check_reachable
from instep.distributed.communication.transport import (
    Transport,
    get_transport,
    overlap_group,
)
from instep.errors import InstepWarning, TrainingError
from instep.process.patching import PatchHandle
from instep.process.torch_private.autograd import queue_callback
from instep.training import gradients
from instep.training.amp.levels import HALVES
from instep.training.buckets.bucket_sums import make_bucket
from instep.training.buckets.codec import BucketCodec
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.layout import BucketLayout, plan_buckets
from instep.training.buckets.sparse_sums import find_tables, sum_table
from instep.training.losses import averages
from instep.training.losses.averages import (
    GradientAverage,
    externally_averaged,
    zero_if_placeholder,
)
from instep.training.replicas import with_copies

_IGNORED_DEVICES = (
    "apex.parallel.DistributedDataParallel has no device_ids and no output_device; they are "
    "ignored, since each rank has one device. [INS707]"
)
_bucket_numbers = count()
"""All ranks make their buckets in the same order."""


class DistributedDataParallel(nn.Module):
    """Apex's wrapper: parameters are rank 0's, gradients are averaged during backward.

    Each rank's loss counts the same, whatever the number of its rows, as in Apex. (Where
    `instep.shard` made the batches, each row does, as in `instep.replicate`.) Parameters that some
    ranks do not use are no error.

    Args:
        module: any module; parameters only are broadcast, buffers stay each rank's.
        message_size: elements at which a bucket is full.
        delay_allreduce: send when backward has ended, not while it runs.
        allreduce_trigger_params: parameters whose gradient closes a bucket, instead of its size.
        retain_allreduce_buffers: keep the sums as `allreduce_buffers` until the next backward.
        allreduce_always_fp32: add up half precision in float32.
        gradient_average: divide the sum by the number of ranks.
        gradient_predivide_factor: what to divide by before the sum (the rest after it).
        num_allreduce_streams, allreduce_communicators, gradient_average_split_factor, prof: for
            Apex's sake; they mean nothing here.
        device_ids, output_device: torch's, ignored with a warning: a rank has one device.

    Collective. Raises ValueError for options that contradict each other.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        device_ids: Any = None,
        output_device: Any = None,
    ) -> None:
        super().__init__()
        triggers = allreduce_trigger_params
        _check_options(delay_allreduce, shared_param, triggers, num_allreduce_streams)
        if device_ids is not None or output_device is not None:
            warnings.warn(_IGNORED_DEVICES, InstepWarning, stacklevel=2)
        self.module = module
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_buffers: list[Tensor] = []
        self._disabled = False
        self._in_backward = False
        self._started = 0
        for parameter in module.parameters():
            check_reachable(parameter)
        broadcast_coalesced(with_copies(module.parameters()))
        self._trained, self._tables = _split_trained(module)
        world = get_transport()
        predivide = 1.0 / gradient_predivide_factor
        postdivide = gradient_predivide_factor / world.size if gradient_average else 1.0
        self._factor = predivide * postdivide
        layouts = _plan(self._trained, message_size, triggers)
        self._codecs = [
            _AveragingCodec(layout.numel, predivide, postdivide, always_fp32=allreduce_always_fp32)
            for layout in layouts
        ]
        # SyncBatchNorm sends its own messages in between, and at which point of backward a bucket
        # is full depends on which parameters this rank has used.
        self._transport = overlap_group(world)
        self._buckets = self._make_buckets(layouts)
        self._bucket_number = {
            index: k for k, bucket in enumerate(self._buckets) for index in bucket.indices
        }
        self._ready: list[set[int]] = [set() for _ in self._buckets]
        """The parameters of each bucket whose gradient this backward has computed."""
        # The garbage collector does not see what a tensor's hooks hold; what the module holds, it
        # does. So its gradients are averaged for as long as it lives, with or without this wrapper.
        vars(module)["_apex_average"] = _Owner(self)
        self._add_hooks()
        if world.size > 1:
            _note_averaged([*self._trained, *self._tables], is_mean=gradient_average)

    def _make_buckets(self, layouts: Iterable[BucketLayout]) -> list[GradBucket]:
        return [
            make_bucket(
                layout,
                {slot.index: self._trained[slot.index] for slot in layout.slots},
                self._transport,
                ids=(next(_bucket_numbers),),
                codec=codec,
                grads_as_views=False,
            )
            for layout, codec in zip(layouts, self._codecs, strict=True)
        ]

    def _add_hooks(self) -> None:
        """Notice each gradient of a trained parameter, for as long as this wrapper lives."""
        reference = weakref.ref(self)

        def notice_grad(index: int | None) -> None:
            model = reference()
            if model is not None:
                model._on_grad(index)

        for index, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: notice_grad(index))
        for table in self._tables:
            table.register_post_accumulate_grad_hook(lambda _: notice_grad(None))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        averages.note_forward((args, kwargs))
        return self.module(*args, **kwargs)

    def enable_allreduce(self) -> None:
        """Average gradients again, with what has been added up since."""
        self._disabled = False

    def disable_allreduce(self) -> None:
        """Leave in `.grad` what this rank adds up."""
        self._disabled = True

    def _on_grad(self, index: int | None) -> None:
        """Autograd calls this when a parameter's gradient is in `.grad`; None for a table's."""
        if self._disabled:
            return
        if not self._in_backward:
            self._in_backward = True
            queue_callback(self._finish)
        if index is None:
            return
        number = self._bucket_number[index]
        if number < self._started:
            shape = tuple(self._trained[index].shape)
            raise TrainingError(
                f"a parameter of shape {shape} got another gradient in one backward after the "
                "first was sent (reentrant checkpointing); use delay_allreduce=True."
            )
        self._ready[number].add(index)
        while self._started < len(self._buckets) and self._can_start(self._started):
            self._start_next()

    def _can_start(self, number: int) -> bool:
        bucket = self._buckets[number]
        if self.delay_allreduce or not bucket.starts_early:
            return False
        return len(self._ready[number]) == len(bucket.layout.slots)

    def _start_next(self) -> None:
        """Start the next bucket, with every `.grad` there is. All ranks have the same order."""
        bucket = self._buckets[self._started]
        for index in bucket.indices:
            if self._trained[index].grad is not None:
                bucket.add_accumulated(index)
        bucket.start(self._transport)
        self._started += 1

    def _finish(self) -> None:
        """Backward has ended."""
        try:
            while self._started < len(self._buckets):
                self._start_next()
            for bucket in self._buckets:
                bucket.wait()
                bucket.write_grads()
            for table in self._tables:
                table.grad = sum_table(table.grad, table) * self._factor
            if self.retain_allreduce_buffers:
                self.allreduce_buffers = [codec.sums.clone() for codec in self._codecs]
        finally:
            self._in_backward, self._started = False, 0
            for bucket, ready in zip(self._buckets, self._ready, strict=True):
                bucket.reset()
                ready.clear()


class _Owner:
    """Keeps a wrapper alive. Copies of the module, and files of it, have None in its place."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class _AveragingCodec(BucketCodec):
    """Multiplies before and after the sum, and can sum half precision in float32."""

    def __init__(
        self, numel: int, predivide: float, postdivide: float, *, always_fp32: bool
    ) -> None:
        self.sums = self._sent = torch.empty(0, device="cpu")
        """The gradients of the bucket; what is sent has flags and a checksum behind them."""
        self._numel = numel
        self._predivide, self._postdivide = predivide, postdivide
        self._always_fp32 = always_fp32

    def start(self, flat: Tensor, transport: Transport) -> None:
        half = flat.dtype in HALVES
        self._sent = flat.float() if half and self._always_fp32 else flat
        self.sums = self._sent[: self._numel]
        if self._predivide != 1.0:
            self.sums.mul_(self._predivide)
        super().start(self._sent, transport)

    def wait(self, flat: Tensor) -> None:
        super().wait(flat)
        self.sums.mul_(self._postdivide)
        if self._sent is not flat:
            flat.copy_(self._sent)


def _note_averaged(parameters: Iterable[nn.Parameter], *, is_mean: bool) -> None:
    """Let backward weigh a rank's loss by its rows where `instep.shard` made the batch, and give a
    rank without rows gradients of zeros."""
    PatchHandle([gradients.PATCH])
    average = GradientAverage(is_mean=is_mean)
    for parameter in parameters:
        externally_averaged[parameter] = average
        parameter.register_hook(zero_if_placeholder)


def _check_options(delay: bool, shared: object, triggers: object, streams: int) -> None:
    if shared is not None:
        raise ValueError("shared_param is no longer an option; use delay_allreduce=True instead.")
    if delay and triggers is not None:
        raise ValueError("allreduce_trigger_params has no meaning with delay_allreduce=True.")
    if delay and streams > 1:
        raise ValueError("num_allreduce_streams has no meaning with delay_allreduce=True.")


def _split_trained(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that are trained, the last first, and the tables among them: their gradients
    are sparse, and sent when backward has ended."""
    tables = {id(table) for table in find_tables(module)}
    trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
    return [p for p in trained if id(p) not in tables], [p for p in trained if id(p) in tables]


def _plan(
    parameters: list[nn.Parameter], message_size: int, triggers: Iterable[Tensor] | None
) -> list[BucketLayout]:
    """Buckets in the order of backward, closed by size or behind a trigger."""
    closing = {id(parameter) for parameter in triggers or ()}
    closed = 0
    keys = []
    for parameter in parameters:
        keys.append((closed, parameter.dtype, parameter.device))
        closed += id(parameter) in closing
    return plan_buckets(
        [(k, p.numel()) for k, p in enumerate(parameters)],
        keys,
        capacity=message_size if triggers is None else sum(p.numel() for p in parameters),
    )


class Reducer:
    """Averages gradients when `reduce()` is called, and only then.

    Args:
        module_or_grads_list: a module, whose parameters become rank 0's, or nested gradients.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            broadcast_coalesced(with_copies(self.module.parameters()))
        else:
            self.grads = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Replace each gradient by its mean over the ranks. Collective."""
        of_module = () if self.module is None else self.module.parameters()
        grads = self.grads or [p.grad for p in of_module if p.grad is not None]
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for grad in grads:
            groups.setdefault((grad.dtype, grad.device), []).append(grad.detach())
        world = get_transport()
        for group in groups.values():
            flat = torch.cat([grad.reshape(-1) for grad in group])
            world.all_reduce(flat, "sum").wait()
            means = (flat / world.size).split([grad.numel() for grad in group])
            for grad, mean in zip(group, means, strict=True):
                grad.copy_(mean.view(grad.shape))


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable):
        for each in nested:
            yield from _tensors(each)
