"""Sums over the ranks of what each one's rows add to a parameter's gradient.

Inside of a divided call a parameter is represented by an alias. What reaches the alias in backward
is this rank's part and is summed over the ranks; what reaches the parameter by other ways, from a
penalty that the script computes, is whole already and is not.

In the script's `backward()` the sums travel in buckets while the rest of it still runs. Where a
gradient is asked for as a value, or is to be differentiated again, it is summed on the spot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.tensors import apply
from instep.distributed.communication.transport import Transport
from instep.process import settings
from instep.training.buckets.layout import plan_buckets
from instep.training.reducer import all_reduce_sparse
from instep.unedited.sharded_call.run.grad_buckets import Cargo, load
from instep.unedited.sharded_call.run.mappings import reduce_from_region

_AT_ONCE = 2**64 - 1
"""The sequence number that autograd gives to what must not wait: its queue runs the highest
first, and an alias is made before everything that is computed from it."""

_place_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of each parameter its cargo, its place there, and of which kind it was then."""
_sparse: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters that had a sparse gradient, which does not travel in a bucket."""


def aliases(parameters: Sequence[Tensor], way: Transport) -> tuple[list[Tensor], list[Cargo]]:
    """Tensors that stand for these parameters in one divided call, and what they will travel in.

    They share the parameters' memory, and count as nn.Parameter.
    """
    travelling = [p for p in parameters if not _summed_at_once(p)]
    unplaced = [p for p in travelling if p not in _place_of or _place_of[p][2] != _kind(p)]
    if unplaced:
        _place(unplaced, way)
    groups: dict[Cargo | None, list[int]] = {}
    for k, parameter in enumerate(parameters):
        at_once = _summed_at_once(parameter)
        groups.setdefault(None if at_once else _place_of[parameter][0], []).append(k)
    found: dict[int, Tensor] = {}
    for cargo, members in groups.items():
        own = [parameters[k] for k in members]
        places = [0 if cargo is None else _place_of[p][1] for p in own]
        made = apply(_Alias, cargo, places, way, *own)
        made[0].grad_fn._set_sequence_nr(_AT_ONCE)
        for k, alias in zip(members, made, strict=True):
            alias._is_param = True
            found[k] = alias
    cargoes = sorted((c for c in groups if c is not None), key=lambda cargo: cargo.order)
    return [found[k] for k in range(len(parameters))], cargoes


def is_alias(node: Any) -> bool:
    """Whether this node of the autograd graph is where parameters came into a divided call."""
    return isinstance(node, _Alias._backward_cls)


def _place(parameters: Sequence[Tensor], way: Transport) -> None:
    """Plan how parameters travel that have not been met before."""
    last_first = list(reversed(parameters))  # backward reaches the last ones first
    widest = max(p.element_size() for p in last_first)
    for plan in plan_buckets(
        [(k, p.numel()) for k, p in enumerate(last_first)],
        [(p.dtype, p.device) for p in last_first],
        capacity=int(settings.BUCKET_MIB) * 2**20 // widest,
    ):
        cargo = load(plan, [last_first[slot.index] for slot in plan.slots], way)
        for place, slot in enumerate(plan.slots):
            parameter = last_first[slot.index]
            _place_of[parameter] = (cargo, place, _kind(parameter))


def _kind(parameter: Tensor) -> tuple[object, ...]:
    """What a parameter's gradients have in common, until `model.half()` and the like."""
    return parameter.dtype, parameter.device, parameter.shape


def _summed_at_once(parameter: Tensor) -> bool:
    """Whether its gradient is summed on the spot: the script's hooks must see it whole, and so must
    what the script has computed the parameter from (torch.func.functional_call)."""
    hooks: Any = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return bool(hooks) or not parameter.is_leaf or parameter in _sparse


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cargo: Cargo | None, places: list[int], way: Transport, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cargo, ctx.places, ctx.way, ctx.parameters = cargo, places, way, parameters
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if _under_way is None or not _under_way.takes(ctx.cargo):
            return None, None, None, *summed_all(grads, ctx.way)
        left: list[Tensor | None] = [None] * len(grads)
        for k, (place, grad) in enumerate(zip(ctx.places, grads, strict=True)):
            if grad is not None and grad.is_sparse:
                left[k] = all_reduce_sparse(grad)
                _sparse[ctx.parameters[k]] = True
            elif grad is not None:
                ctx.cargo.add(place, grad)
        _under_way.came_by(ctx.cargo)
        return None, None, None, *left


def summed_all(grads: Sequence[Tensor | None], way: Transport) -> list[Tensor | None]:
    """The sums over ranks of these tensors, where they are any: one message per dtype."""
    results = list(grads)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for k, grad in enumerate(grads):
        if grad is not None and grad.is_sparse:
            results[k] = all_reduce_sparse(grad)
        elif grad is not None:
            kinds.setdefault((grad.dtype, grad.device), []).append(k)
    for members in kinds.values():
        tensors = [grad for k in members if (grad := grads[k]) is not None]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = reduce_from_region(flat, 1, way).split([tensor.numel() for tensor in tensors])
        for k, tensor, part in zip(members, tensors, parts, strict=True):
            results[k] = part.view(tensor.shape)
    return results


class _Backward:
    """A `backward()` of the script's under way."""

    def __init__(self, cargoes: list[Cargo], way: Transport) -> None:
        self.cargoes = cargoes
        self._way = way
        self._launched = 0
        self._task: int | None = None

    def begin(self, _: Any) -> None:
        """Autograd has come to a root: first of all in this backward, in no other inside of it."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()

    def takes(self, cargo: Cargo | None) -> bool:
        """Whether gradients can still travel in this; not those that a function or a hook of the
        script's asks for while it runs."""
        is_this = torch._C._current_graph_task_id() == self._task
        return is_this and cargo in self.cargoes[self._launched :]

    def came_by(self, cargo: Cargo) -> None:
        """A divided call has brought its part. Messages leave in one order on all ranks."""
        cargo.expected -= 1
        waiting = self.cargoes[self._launched :]
        for following in waiting:
            if following.expected > 0 or not following.early:
                break
            following.launch(self._way)
            self._launched += 1

    def finish(self) -> None:
        for cargo in self.cargoes[self._launched :]:
            cargo.launch(self._way)
        for cargo in self.cargoes:
            cargo.deliver()


_under_way: _Backward | None = None


@contextmanager
def collecting(
    roots: Iterable[Tensor], used: Iterable[Sequence[Cargo]], way: Transport
) -> Iterator[None]:
    """While autograd runs inside, sums travel in buckets; at the end they are in `.grad`.

    `used`: the cargoes of each divided call that this backward reaches from its `roots`.
    """
    global _under_way
    cargoes: dict[Cargo, None] = {}
    for call in used:
        for cargo in call:
            cargo.expected += 1
            cargoes[cargo] = None
    _under_way = _Backward(list(cargoes), way)
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    handles = [node.register_prehook(_under_way.begin) for node in nodes]
    try:
        yield
        _under_way.finish()
    finally:
        for handle in handles:
            handle.remove()
        for cargo in cargoes:
            cargo.reset()
        _under_way = None
