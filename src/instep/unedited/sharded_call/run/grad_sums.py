"""Sums over the ranks of what each one's rows add to a parameter's gradient.

Inside of a sharded call an alias stands in for each parameter. The gradient that reaches the alias
is this rank's part and is summed over the ranks. A gradient that reaches the parameter by another
path, from a penalty that the script computes, is whole already and is not summed.

In the script's `backward()` the sums travel in buckets while the rest of it still runs. Where a
gradient is asked for as a value, or is to be differentiated again, it is summed at once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.tensors import apply
from instep.distributed.communication.transport import Transport
from instep.process.torch_private.autograd import current_graph_task_id, hooks_of
from instep.training.autograd_graph import Root, next_nodes, node_of, walk
from instep.training.blocks import Block
from instep.training.buckets.bucket_sums import finish_buckets
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.sparse_sums import all_reduce_sparse, sum_table
from instep.training.drift.non_finite import FiniteCheck
from instep.unedited.sharded_call.run.mappings import is_region_input, reduce_from_region
from instep.unedited.sharded_call.shards.grad_places import (
    AT_ONCE,
    divide_into_buckets,
    have_hooks,
    note_sparse,
)
from instep.unedited.sharded_call.shards.large_weights import (
    CollectedRows,
    collect_rows,
    sum_over_rows,
)
from instep.unedited.sharded_call.shards.local_sums import (
    alias_for_shards,
    check_all_sparse,
    count_as_parameters,
    is_alias_for_shard,
)
from instep.unedited.sharded_call.shards.node_hooks import node_hooks_of
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_HIGHEST_PRIORITY = 2**64 - 1
"""The sequence number that autograd gives to nodes that must not wait: its queue runs the highest
first, and an alias is made before everything that is computed from it."""

_IDS = attrgetter("ids")
_SPARSE = 2
"""The kind of a gradient in the ranks' message about theirs: 0 is none, 1 is dense."""


class CallGradients:
    """The gradients of the parameters of one sharded call."""

    def __init__(self) -> None:
        self.buckets: list[GradBucket] = []
        self.module: weakref.ref[nn.Module] | None = None
        """The module that was called."""
        self.block: Block | None = None
        """This rank's rows of its batch; None where it has several shards."""
        self.backward: BucketedBackward | None = None
        """The `backward()` under way that reaches the call."""
        self.collected_rows: dict[int, list[CollectedRows]] = {}
        """With virtual shards, what each of this rank's has for large weights, by their index."""
        self.have_hooks = False
        """Whether the script has hooks on the gradient of any of the parameters."""
        self.order: dict[int, int] = {}
        """If so, by the id of each, where it comes when a backward ends with their gradients."""

    def note_order(self, outputs: Iterable[Tensor]) -> None:
        """Find the order in which a backward from these outputs of the call ends with gradients."""
        last_uses: dict[int, tuple[int, int]] = {}

        def visit(node: Any) -> Iterable[Any]:
            if is_alias(node) or is_region_input(node):
                return ()
            for place, (child, index) in enumerate(node.next_functions):
                if isinstance(child, _Alias._backward_cls):
                    alias: Any = child
                    key, use = id(alias.parameters[index]), (-node._sequence_nr(), place)
                    last_uses[key] = max(last_uses.get(key, use), use)
            return next_nodes(node)

        walk(outputs, visit)
        by_last_use = sorted(last_uses, key=last_uses.__getitem__)
        self.order = {key: k for k, key in enumerate(by_last_use)}


def alias_parameters(
    parameters: Sequence[Tensor], gradients: CallGradients, group: ShardGroup
) -> list[list[Tensor]]:
    """For each of this rank's shards, aliases of these parameters for the sharded call with these
    gradients.

    They share the parameters' memory, have the same attributes, and count as nn.Parameter.
    """
    if group.is_virtual:  # buckets add up several calls before they are summed over the ranks
        own = _alias(parameters, gradients, None, [0] * len(parameters), group)
        by_shard = alias_for_shards(own, len(group.own), _HIGHEST_PRIORITY)
        gradients.collected_rows = collect_rows(parameters, by_shard, group)
        return by_shard
    parts = divide_into_buckets(parameters, gradients.module, group.transport)
    gradients.have_hooks = have_hooks(parameters) and any(AT_ONCE in part.slots for part in parts)
    found: list[Any] = [None] * len(parameters)
    for part in parts:
        own = [parameters[k] for k in part.members]
        aliases = _alias(own, gradients, part.bucket, part.slots, group)
        for k, alias in zip(part.members, aliases, strict=True):
            found[k] = alias
    buckets = [part.bucket for part in parts if part.bucket is not None]
    gradients.buckets = sorted(buckets, key=_IDS)
    return [found]


def _alias(
    parameters: Sequence[Tensor],
    gradients: CallGradients,
    bucket: GradBucket | None,
    indices: list[int],
    group: ShardGroup,
) -> list[Tensor]:
    aliases: tuple[Tensor, ...] = apply(_Alias, gradients, bucket, indices, group, *parameters)
    node: Any = aliases[0].grad_fn
    node._set_sequence_nr(_HIGHEST_PRIORITY)
    count_as_parameters(aliases, parameters)
    return list(aliases)


def is_alias(node: Any) -> bool:
    """Whether this node of the autograd graph is the input of a parameter into a sharded call."""
    return isinstance(node, _Alias._backward_cls) or is_alias_for_shard(node)


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gradients: CallGradients,
        bucket: GradBucket | None,
        indices: list[int],
        group: ShardGroup,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.bucket, ctx.indices = gradients, bucket, indices
        ctx.group, ctx.parameters = group, parameters
        ctx.set_materialize_grads(False)
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        sums = _Alias._sums(ctx, grads)
        if have_hooks(ctx.parameters):
            pairs = zip(ctx.parameters, sums, strict=True)
            _keep_from_none(parameter for parameter, total in pairs if total is None)
            _call_in_order(ctx)
        return None, None, None, None, *sums

    @staticmethod
    def _sums(ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """The sums over the ranks; None for those that travel in a bucket or have no gradient."""
        backward = ctx.gradients.backward
        if ctx.group.is_virtual:
            return _sum_shards(ctx, grads)
        if backward is None or not backward.accepts(ctx.bucket):
            return _reduce_now(_without_gaps(grads, ctx.parameters, ctx.group), ctx.group)
        sums: list[Tensor | None] = [None] * len(grads)
        at_once = [index == AT_ONCE for index in ctx.indices]
        if have_hooks(ctx.parameters):  # by now: the forward saw none
            pairs = zip(ctx.parameters, at_once, strict=True)
            at_once = [is_one or have_hooks([parameter]) for parameter, is_one in pairs]
        if any(at_once):
            of_these = [g if is_one else None for g, is_one in zip(grads, at_once, strict=True)]
            sums = _reduce_now(_without_gaps(of_these, ctx.parameters, ctx.group), ctx.group)
        for k, (index, grad) in enumerate(zip(ctx.indices, grads, strict=True)):
            if grad is None or at_once[k]:
                continue
            if grad.is_sparse:
                sums[k] = all_reduce_sparse(grad)
                note_sparse(ctx.parameters[k])
            else:
                ctx.bucket.add(index, grad)
        backward.finish_call(ctx.bucket)
        return sums


def _call_in_order(ctx: Any) -> None:
    """Let autograd call the script's hooks on the parameters of this alias as in one process. They
    get their gradients at once, so their nodes' numbers decide, of which the highest is first."""
    for parameter, (node, _) in zip(ctx.parameters, ctx.next_functions, strict=True):
        place = ctx.gradients.order.get(id(parameter))
        if place is not None and parameter.is_leaf:
            node._set_sequence_nr(_HIGHEST_PRIORITY - 1 - place)


def _keep_from_none(parameters: Iterable[Tensor]) -> None:
    """Let the script's hooks on these be called for gradients only. Autograd would call them with
    None: the node of their aliases is reached for the sake of other parameters."""
    for parameter in parameters:
        for hooks in filter(None, (hooks_of(parameter), *node_hooks_of(parameter))):
            for key, hook in hooks.items():
                if not isinstance(hook, _GradientHook):
                    hooks[key] = _GradientHook(hook)


class _GradientHook:
    """A hook of the script's that is not called where there is no gradient."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *grads: Any) -> Any:
        given = grads[-1]  # of a node, its hooks get what comes to it last
        has_gradient = (
            any(each is not None for each in given)
            if isinstance(given, tuple)
            else (given is not None)
        )
        return self._hook(*grads) if has_gradient else None


def _sum_shards(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sums over virtual shards, from those over this rank's. Collective."""
    own = _without_gaps(grads, ctx.parameters, ctx.group)
    results = _reduce_now(own, ctx.group)
    rows = ctx.gradients.collected_rows
    weights = {k: ctx.parameters[k] for k in rows}
    for k, gradient in (sum_over_rows(weights, rows, ctx.group) if weights else {}).items():
        before = results[k]
        results[k] = gradient if before is None else before + gradient
    return results


def _without_gaps(
    grads: Sequence[Tensor | None], parameters: Sequence[Tensor], group: ShardGroup
) -> tuple[Tensor | None, ...]:
    """This rank's gradients; zeros where only other ranks have one, as those of an expert to whom
    none of this rank's rows goes. Sparse ones are summed. Collective.

    On accelerators, where it would have to wait for them, as they are.
    """
    if not group.is_virtual and group.transport.control_device.type != "cpu":
        return tuple(g if g is None or not g.is_sparse else all_reduce_sparse(g) for g in grads)
    kinds = torch.tensor(
        [0 if grad is None else _SPARSE if grad.is_sparse else 1 for grad in grads], device="cpu"
    )
    by_rank = torch.stack(group.transport.all_gather(kinds)).T.tolist()
    results = list(grads)
    for k, (parameter, found) in enumerate(zip(parameters, by_rank, strict=True)):
        check_all_sparse([kind == _SPARSE for kind in found if kind])
        if _SPARSE in found:
            results[k] = (
                group.sum_sparse_over_ranks(grads[k], parameter.device)
                if group.is_virtual
                else sum_table(grads[k], parameter)
            )
        elif any(found) and grads[k] is None:
            results[k] = torch.zeros_like(parameter)
    return tuple(results)


def _reduce_now(grads: Sequence[Tensor | None], group: ShardGroup) -> list[Tensor | None]:
    """The sums over ranks of these tensors: one message per dtype. Sparse ones are sums."""
    results = list(grads)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for k, grad in enumerate(results):
        if grad is not None and not grad.is_sparse:
            groups.setdefault((grad.dtype, grad.device), []).append(k)
    for members in groups.values():
        tensors = [grad for k in members if (grad := grads[k]) is not None]
        if group.is_virtual and not torch.is_grad_enabled():
            if len(group.own) == 1:  # no sums of this rank's own, which nobody else reads
                tensors = [tensor.clone() for tensor in tensors]
            for k, total in zip(members, group.sum_over_ranks(tensors), strict=True):
                results[k] = total
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sums = reduce_from_region([flat], [1], group).split([x.numel() for x in tensors])
        for k, tensor, total in zip(members, tensors, sums, strict=True):
            results[k] = total.view(tensor.shape)
    return results


class BucketedBackward:
    """One `backward()` of the script. While it runs inside, sums travel in buckets; at the end they
    are in `.grad`.

    Args:
        roots: on which backward is called.
        calls: the gradients of each sharded call that it reaches.
        transport: of the buckets.
        finite_check: looks at this rank's gradients before they are summed.
    """

    def __init__(
        self,
        roots: Iterable[Root],
        calls: Sequence[CallGradients],
        transport: Transport,
        finite_check: FiniteCheck,
    ) -> None:
        self._roots, self._calls = roots, calls
        self._handles: list[Any] = []
        self._finite_check = finite_check
        self._expected = Counter(bucket for call in calls for bucket in call.buckets)
        """How many sharded calls have not added their part of a bucket yet."""
        self._buckets = list(self._expected)
        self._transport = transport
        self._started = 0
        self._graph_task: int | None = None

    def __enter__(self) -> None:
        for call in self._calls:
            call.backward = self
        nodes = [node for root in self._roots if (node := node_of(root)) is not None]
        self._handles = [node.register_prehook(self._begin) for node in nodes]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for handle in self._handles:
                handle.remove()
            for call in self._calls:
                call.backward = None
            for bucket in self._buckets:
                bucket.reset()

    def _begin(self, _: Any) -> None:
        """Autograd has reached a root: before all else in this backward, and in no nested one."""
        if self._graph_task is None:
            self._graph_task = current_graph_task_id()

    def accepts(self, bucket: GradBucket | None) -> bool:
        """Whether gradients can still be added; not those of a nested backward, which a function
        or a hook of the script's runs."""
        is_this = current_graph_task_id() == self._graph_task
        return is_this and bucket in self._buckets[self._started :]

    def finish_call(self, bucket: GradBucket) -> None:
        """A sharded call has added its part. All ranks start the buckets in the same order."""
        self._expected[bucket] -= 1
        for following in self._buckets[self._started :]:
            if self._expected[following] > 0 or not following.starts_early:
                break
            self._finite_check.inspect([following], are_last=following is self._buckets[-1])
            following.start(self._transport)
            self._started += 1

    def _finish(self) -> None:
        """Backward has ended: start the other buckets, wait, and write the sums into `.grad`."""
        self._finite_check.inspect(self._buckets[self._started :], are_last=True)
        finish_buckets(self._buckets, self._started, self._transport)
