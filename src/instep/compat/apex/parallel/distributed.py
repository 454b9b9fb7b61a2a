"""Gradients averaged over the ranks, during backward or when asked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from instep.distributed.communication.tensors import check_reachable
from instep.distributed.communication.transport import (
    Pending,
    Transport,
    broadcast_coalesced,
    overlap_group,
    transport,
)
from instep.errors import InstepWarning, TrainingError
from instep.training.buckets.checksum import LENGTH, check, mark
from instep.training.buckets.layout import Bucket, plan_buckets
from instep.training.errors import MixedSumsError

_numbers = count()
"""Of the buckets, in the order in which all ranks make them."""


class DistributedDataParallel(nn.Module):
    """Apex's wrapper: parameters are rank 0's, gradients are averaged during backward.

    Each rank's loss counts the same, whatever the number of its rows, as in Apex (in
    `instep.replicate` each row does). Parameters that some ranks do not use are no error.

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
            warnings.warn(
                "apex.parallel.DistributedDataParallel has no device_ids and no output_device; "
                "they are ignored, since each rank has one device.",
                InstepWarning,
                stacklevel=2,
            )
        self.module = module
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_buffers: list[Tensor] = []
        self._way = transport()
        self._aside = overlap_group(self._way)
        """Where the buckets travel: SyncBatchNorm talks in between, and where in between a bucket
        is full depends on what this rank has used."""
        self._before = 1.0 / gradient_predivide_factor
        self._after = gradient_predivide_factor / self._way.size if gradient_average else 1.0
        self._off = False
        self._under_way = False
        self._launched = 0
        for parameter in module.parameters():
            check_reachable(parameter)
        broadcast_coalesced(list(module.parameters()))
        self._trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self._cargoes = _load(self._trained, message_size, triggers, allreduce_always_fp32)
        self._cargo_of = {slot.index: c for c in self._cargoes for slot in c.plan.slots}
        for index, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._ready(index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module(*args, **kwargs)

    def enable_allreduce(self) -> None:
        """Average gradients again, with what has been added up since."""
        self._off = False

    def disable_allreduce(self) -> None:
        """Leave in `.grad` what this rank adds up."""
        self._off = True

    def _ready(self, index: int) -> None:
        """A parameter's gradient is in `.grad`: autograd calls this."""
        if self._off:
            return
        if not self._under_way:
            self._under_way = True
            Variable._execution_engine.queue_callback(self._finish)
        cargo = self._cargo_of[index]
        if cargo.pending is not None:
            shape = tuple(self._trained[index].shape)
            raise TrainingError(
                f"a parameter of shape {shape} got another gradient in one backward after the "
                "first was sent (reentrant checkpointing); use delay_allreduce=True."
            )
        cargo.ready.add(index)
        if not self.delay_allreduce and self._aside is not self._way:
            self._launch(full_only=True)

    def _launch(self, *, full_only: bool) -> None:
        """Start the buckets in their order: the same on all ranks."""
        while self._launched < len(self._cargoes):
            cargo = self._cargoes[self._launched]
            if full_only and not cargo.full:
                return
            cargo.launch(self._trained, self._before, self._aside)
            self._launched += 1

    def _finish(self) -> None:
        """Backward has ended."""
        try:
            self._launch(full_only=False)
            for cargo in self._cargoes:
                cargo.deliver(self._trained, self._after)
            if self.retain_allreduce_buffers:
                self.allreduce_buffers = [c.flat[: c.plan.numel].clone() for c in self._cargoes]
        finally:
            self._under_way, self._launched = False, 0
            for cargo in self._cargoes:
                cargo.reset()


class _Cargo:
    """A bucket on its way: one flat tensor, behind whose gradients lies "this rank has it" and the
    bucket's mark."""

    def __init__(self, plan: Bucket, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self._mark = mark(torch.empty(0, dtype=dtype, device=device), next(_numbers))
        self.flat = self._mark.new_zeros(plan.numel + len(plan.slots) + LENGTH)
        self.ready: set[int] = set()
        """Of which parameters this backward has made a gradient."""
        self._sent: list[bool] = []
        """Of which slots this rank had a gradient: what it sent, it need not ask for."""
        self.pending: Pending | None = None

    @property
    def full(self) -> bool:
        """Whether nothing more will come."""
        return len(self.ready) == len(self.plan.slots)

    def launch(self, parameters: list[nn.Parameter], factor: float, way: Transport) -> None:
        """Send every `.grad` there is, times `factor`, and zeros for the rest."""
        self.flat.zero_()
        self.flat[-LENGTH:] = self._mark
        self._sent = [parameters[slot.index].grad is not None for slot in self.plan.slots]
        for k, slot in enumerate(self.plan.slots):
            grad = parameters[slot.index].grad
            if grad is not None:
                self.flat[slot.start : slot.stop].view(grad.shape).copy_(grad)
                self.flat[self.plan.numel + k] = 1
        if factor != 1.0:
            self.flat[: self.plan.numel].mul_(factor)
        self.pending = way.all_reduce(self.flat, "sum")

    def deliver(self, parameters: list[nn.Parameter], factor: float) -> None:
        """Wait, and put the sums, times `factor`, into `.grad` of what any rank has."""
        assert self.pending is not None
        self.pending.wait()
        check(self.flat[-LENGTH:], MixedSumsError.of_models())
        self.flat[: self.plan.numel].mul_(factor)
        # Asking a GPU means to wait for it.
        asked = not all(self._sent)
        held = self.flat[self.plan.numel : -LENGTH].tolist() if asked else self._sent
        for slot, ranks in zip(self.plan.slots, held, strict=True):
            parameter = parameters[slot.index]
            if not ranks:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(self.flat[slot.start : slot.stop].view(parameter.shape))

    def reset(self) -> None:
        """Forget this backward."""
        self.ready.clear()
        self.pending = None


def _check_options(delay: bool, shared: object, triggers: object, streams: int) -> None:
    if shared is not None:
        raise ValueError("shared_param is an option no more; use delay_allreduce instead.")
    if delay and triggers is not None:
        raise ValueError("allreduce_trigger_params has no meaning with delay_allreduce=True.")
    if delay and streams > 1:
        raise ValueError("num_allreduce_streams has no meaning with delay_allreduce=True.")


def _load(
    parameters: list[nn.Parameter],
    message_size: int,
    triggers: Iterable[Tensor] | None,
    always_fp32: bool,
) -> list[_Cargo]:
    """Buckets in the order of backward, closed by size or behind a trigger."""
    closing = {id(parameter) for parameter in triggers or ()}
    closed = 0
    kinds = []
    for parameter in parameters:
        kinds.append((closed, parameter.dtype, parameter.device))
        closed += id(parameter) in closing
    plans = plan_buckets(
        [(k, p.numel()) for k, p in enumerate(parameters)],
        kinds,
        capacity=message_size if triggers is None else sum(p.numel() for p in parameters),
    )
    cargoes = []
    for plan in plans:
        first = parameters[plan.slots[0].index]
        half = first.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half and always_fp32 else first.dtype
        cargoes.append(_Cargo(plan, dtype, first.device))
    return cargoes


# ------------------------------------------------------------------------------- when asked


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
            broadcast_coalesced(list(self.module.parameters()))
        else:
            self.grads = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Replace each gradient by its mean over the ranks. Collective."""
        of_module = () if self.module is None else self.module.parameters()
        grads = self.grads or [p.grad for p in of_module if p.grad is not None]
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for grad in grads:
            kinds.setdefault((grad.dtype, grad.device), []).append(grad.detach())
        for group in kinds.values():
            flat = torch.cat([grad.reshape(-1) for grad in group])
            way = transport()
            way.all_reduce(flat, "sum").wait()
            for grad, mean in zip(
                group, (flat / way.size).split([grad.numel() for grad in group]), strict=True
            ):
                grad.copy_(mean.view(grad.shape))


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable):
        for each in nested:
            yield from _tensors(each)
