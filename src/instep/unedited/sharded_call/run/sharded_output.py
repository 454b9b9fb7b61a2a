"""A large output of a sharded call, whose rows stay on their ranks until an operation needs them.

Logits of a language model or of a segmentation are often read by nothing but a loss, and a loss
that adds up over rows can be computed from each rank's own. To everything else this is a tensor
like any other: the first operation on it gathers the rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from instep.distributed.communication.tensors import apply
from instep.distributed.communication.thread_channel import ThreadChannel
from instep.distributed.communication.transport import get_transport
from instep.process import in_main_thread
from instep.process.patching import Function
from instep.process.torch_private.dispatch import DisableTorchFunctionSubclass
from instep.process.torch_private.tensors import make_wrapper_subclass, tree_map_only
from instep.training.blocks import Block
from instep.training.pytree import versions
from instep.unedited.sharded_call.plan.sharding_plan import MemoryOrder
from instep.unedited.sharded_call.run.mappings import (
    gather_from_region,
    gather_rows,
    scatter_to_region,
)
from instep.unedited.sharded_call.shards.node_names import named_like
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_FIRST_CHANNEL, _CHANNELS = 1 << 20, 1 << 20
"""The tags of messages between threads; those below are of loaders."""
_numbers = count()
LARGE = 2**20
"""Bytes of a whole output from which on gathering it costs more than the two messages that a loss
over rows needs."""


_alive: dict[int, weakref.ref[ShardedOutput]] = {}
"""By their numbers."""


def has_sharded_outputs() -> bool:
    """Whether the rows of any output are still on their ranks only."""
    outputs = [reference() for reference in [*_alive.values()]]
    return any(output is not None and output.full is None for output in outputs)


def gather_outputs() -> None:
    """Gather the outputs that the script still holds, as far as their rows are on their ranks only,
    so that one rank can read them by itself. Collective."""
    found = {
        number: output
        for number, reference in [*_alive.items()]
        if (output := reference()) is not None
    }
    for number in sorted(set.intersection(*map(set, get_transport().all_gather_object([*found])))):
        found[number].full_tensor()


class ShardedOutput(Tensor):
    """All ranks' rows (dimension 0), of which this one holds its own."""

    local: Tensor
    """(this rank's rows, ...): part of the autograd graph inside of the call."""
    block: Block
    group: ShardGroup
    order: MemoryOrder | None
    """Of the full tensor; None: that of the local one."""
    full: Tensor | None = None
    """All rows, an ordinary tensor, once an operation has needed them."""
    fulls: list[tuple[Tensor, list[int]]]
    """Those of this tensor and of its other shapes, which share memory in plain Python, with the
    versions that they had at first."""
    number: int
    """Equal on all ranks: all make these tensors in the same order."""
    retains_own_grad: bool = False
    """Whether `retain_grad` was called."""
    own_grad: Tensor | None = None
    """What it has kept: (all rows, ...)."""
    __class__ = property(lambda _: Tensor)  # for a script that asks

    @staticmethod
    def of(
        local: Tensor, block: Block, group: ShardGroup, order: MemoryOrder | None = None
    ) -> ShardedOutput:
        """The rows of all ranks, to be gathered when an operation needs them."""
        output: ShardedOutput = apply(named_like(_Shard, local), local, block, group)
        output.local, output.block, output.group, output.order = local, block, group, order
        output.fulls = []
        output.number = number = next(_numbers) % _CHANNELS
        _alive[number] = weakref.ref(output, lambda _: _alive.pop(number, None))
        return output

    def full_tensor(self) -> Tensor:
        """All rows. Collective, the first time."""
        if self.full is None and not in_main_thread():
            return self._full_in_thread()
        changed = self.changed_rows()
        # A script may look at it in inference mode before it computes its loss.
        with (
            torch.inference_mode(torch.is_inference(self.local)),
            torch.set_grad_enabled(self.requires_grad),
        ):
            if changed is not None and (
                self.full is None or changed.data_ptr() != self.full.data_ptr()
            ):
                self.full = changed.view(self.shape)
            elif self.full is None:
                self.full = apply(named_like(_FullTensor, self.local), self)
                self.fulls.append((self.full, versions([self.full])))
        return self.full

    def changed_rows(self) -> Tensor | None:
        """All rows, in the shape in which an operation has changed them in place; None if none
        has."""
        for full, version in self.fulls:
            if full.is_inference() or version != versions([full]):
                return full
        return None

    def is_on_ranks(self) -> bool:
        """Whether no operation has needed all rows."""
        return self.full is None and self.changed_rows() is None

    def _full_in_thread(self) -> Tensor:
        """All rows, for a thread of the script's that reads them on every rank while the main
        threads go on: in messages of their own, and without a gradient."""
        channel = ThreadChannel(_FIRST_CHANNEL + self.number)
        parts = channel.all_gather_object(self.local.detach().cpu())
        return torch.cat(parts).to(self.local.device)

    def is_aligned_with(self, other: ShardedOutput) -> bool:
        """Whether both are still on their ranks, row by row."""
        if not (self.is_on_ranks() and other.is_on_ranks()):
            return False
        return self.block == other.block and self.shape[0] == other.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Describe and reshape the rows where they are; gather them for everything else."""
        if func in _RESHAPING and not kwargs and isinstance(args[0], ShardedOutput):
            reshaped = _reshape(func, *args)
            if reshaped is not None:
                return reshaped
        if func in _OF_GRADIENTS:
            return _OF_GRADIENTS[func](*args, **kwargs or {})
        if func not in _DESCRIBING:
            args, kwargs = tree_map_only(ShardedOutput, cls.full_tensor, (args, kwargs or {}))
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Gather for what bypasses __torch_function__, such as autograd functions of the script."""
        args, kwargs = tree_map_only(
            ShardedOutput, lambda output: output.full_tensor().detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


ShardedOutput.__module__, ShardedOutput.__name__, ShardedOutput.__qualname__ = (
    Tensor.__module__,
    *(Tensor.__name__, Tensor.__qualname__),
)  # what a script prints of it


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, block: Block, group: ShardGroup) -> ShardedOutput:
        ctx.block, ctx.group = block, group
        per_sample = local.shape[0] // block.count
        shape = block.total * per_sample, *local.shape[1:]
        output: ShardedOutput = make_wrapper_subclass(
            ShardedOutput, shape, dtype=local.dtype, device=local.device
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *scatter_to_region(grads[0], [ctx.block], 0, ctx.group), None, None


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: ShardedOutput) -> Tensor:
        return gather_rows([output.local], [output.block], 0, output.group, output.order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


_RESHAPING = (Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape)

_DESCRIBING = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "layout"),
                *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_leaf", "is_sparse"),
            )
        ),
    )
)


def _reshape(func: Callable[..., Any], output: ShardedOutput, *args: Any) -> ShardedOutput | None:
    """An output's rows in another shape; None if they would not remain each rank's own."""
    is_only_looked_at = torch.is_inference_mode_enabled() and not output.local.is_inference()
    if is_only_looked_at or not output.is_on_ranks():
        return None
    block = output.block
    with DisableTorchFunctionSubclass():
        shape = func(torch.empty(output.shape, device="meta"), *args).shape
    if not shape or shape[0] % block.total or output.shape[0] % block.total:
        return None
    rows = block.count * (shape[0] // block.total)
    reshaped = ShardedOutput.of(output.local.reshape(rows, *shape[1:]), block, output.group)
    if output.local.is_contiguous():  # else plain Python has a copy
        reshaped.fulls = output.fulls
    return reshaped


def _register_hook(output: ShardedOutput, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """As Tensor.register_hook. A loss may use the local rows, and something else all rows: both
    gradients come together in the local ones, unless the rows were changed in place before."""
    if output.changed_rows() is not None:
        return output.full_tensor().register_hook(hook)

    def call_hook(grad: Tensor) -> Tensor | None:
        found = hook(_gathered(grad, output))
        if found is None:
            return None
        (own,) = scatter_to_region(found, [output.block], 0, output.group)  # for its derivative
        return own

    return output.local.register_hook(call_hook)


def _retain_grad(output: ShardedOutput) -> None:
    """As Tensor.retain_grad."""
    if output.retains_own_grad:
        return
    output.retains_own_grad = True

    def keep(grad: Tensor) -> None:
        output.own_grad = grad if output.own_grad is None else output.own_grad + grad

    _register_hook(output, keep)


def _set_grad(output: ShardedOutput, grad: Tensor | None) -> None:
    output.own_grad = grad


def grad_of_outputs(
    original: Function, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """As torch.autograd.grad, some of whose inputs may be outputs of sharded calls."""
    if type(inputs) is dict:
        found = grad_of_outputs(original, outputs, tuple(inputs.values()), *args, **kwargs)
        return dict(zip(inputs, found, strict=True))
    args, kwargs = tree_map_only(ShardedOutput, ShardedOutput.full_tensor, (args, kwargs))
    outputs = tree_map_only(ShardedOutput, ShardedOutput.full_tensor, outputs)
    inputs = (inputs,) if isinstance(inputs, Tensor | GradientEdge) else tuple(inputs)
    on_ranks = [isinstance(each, ShardedOutput) and each.changed_rows() is None for each in inputs]
    own = [each.local if is_own else each for each, is_own in zip(inputs, on_ranks, strict=True)]
    own = tree_map_only(ShardedOutput, ShardedOutput.full_tensor, own)
    found = original(outputs, own, *args, **kwargs)
    return tuple(
        _gathered(grad, each) if is_own and grad is not None else grad
        for each, grad, is_own in zip(inputs, found, on_ranks, strict=True)
    )


def _gathered(grad: Tensor, output: ShardedOutput) -> Tensor:
    return gather_from_region([grad], [output.block], 0, output.group)


_GRAD: Any = Tensor.grad
_OF_GRADIENTS: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_grad,
    _GRAD.__get__: attrgetter("own_grad"),
    _GRAD.__set__: _set_grad,
}


def is_zero(output: Any) -> bool:
    """Whether there is nothing but zeros in it, or in this rank's part of it."""
    part = output.local if isinstance(output, ShardedOutput) else output
    return isinstance(part, Tensor) and not part.detach().count_nonzero()
