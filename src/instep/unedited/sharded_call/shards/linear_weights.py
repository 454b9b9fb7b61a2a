"""The gradients of large weights of linear layers, by one product of the rows of all shards.

The gradient of a weight is the product of the gradients of the layer's outputs and its inputs. A
product for each shard writes the whole gradient as often as there are shards, and with few rows it
is bound by that. Where a weight is larger than the rows, these are gathered instead, and the
product of all of them is cut into as many blocks of output features as there are shards: each rank
computes its own. So a block has the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from instep.distributed.communication.tensors import apply
from instep.process.patching import Function
from instep.process.torch_private import current_graph_task_id, peek_interpreter_stack
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_DTYPES = (torch.float32, torch.float64)
_LEAST_BYTES = 1 << 20
"""Sums over shards of smaller weights stay in a cache, and take less time than messages do."""
_ATTRIBUTE = "_instep_linear_rows"


class LinearRows:
    """What a backward has found for one weight on one shard: the gradients of the rows of outputs,
    and the rows of inputs."""

    def __init__(self, index: int, most: int) -> None:
        self.index = index
        """That of the weight among the parameters of the sharded call."""
        self.most = most
        """With more rows than these in a call of the layer, its weight is no larger than they."""
        self._found: list[tuple[int, Tensor, Tensor]] = []

    def add(self, grads: Tensor, inputs: Tensor) -> None:
        """Of one call of the layer: (rows, out) and (rows, in)."""
        self._found.append((current_graph_task_id(), grads, inputs))

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """What was added during the backward under way, and forget all."""
        task = current_graph_task_id()  # others' did not go on to the weights
        own = [(grads, inputs) for number, grads, inputs in self._found if number == task]
        self._found = []
        return [grads for grads, _ in own], [inputs for _, inputs in own]


def collect_rows(
    parameters: Sequence[Tensor], aliases: Sequence[Sequence[Tensor]], group: ShardGroup
) -> dict[int, list[LinearRows]]:
    """Where the aliases of large weights leave their rows: by index of the parameter, of each shard
    of this rank."""
    found: dict[int, list[LinearRows]] = {}
    for k, parameter in enumerate(parameters):
        if parameter.dim() != 2 or parameter.dtype not in _DTYPES:
            continue
        if parameter.nbytes >= _LEAST_BYTES and len(parameter) >= group.size:
            most = parameter.numel() // (sum(parameter.shape) * group.size)
            found[k] = [LinearRows(k, most) for _ in aliases]
            for own, rows in zip(aliases, found[k], strict=True):
                setattr(own[k], _ATTRIBUTE, rows)
    return found


def rows_of(weight: Tensor) -> LinearRows | None:
    """Where an alias of a large weight leaves its rows; None for any other tensor."""
    return getattr(weight, _ATTRIBUTE, None)


@dataclass
class LinearCall:
    """A call of torch.nn.functional.linear with the alias of a large weight."""

    original: Function
    input: Tensor
    weight: Tensor
    bias: Tensor | None

    def is_collected(self, rows: LinearRows) -> bool:
        """Whether its rows are collected there."""
        x = self.input
        return (
            torch.is_grad_enabled()
            and type(x) is Tensor
            and x.dtype == self.weight.dtype
            and 0 < x.numel() <= rows.most * x.shape[-1]
            and not torch.is_autocast_enabled(x.device.type)
            and peek_interpreter_stack() is None  # no transform of torch.func
        )


def linear_of_shards(calls: Sequence[LinearCall]) -> Sequence[Tensor]:
    """What the calls of several shards return, in one node of the autograd graph."""
    inputs = [call.input.reshape(-1, call.input.shape[-1]).contiguous() for call in calls]
    terms = zip(inputs, (c.weight for c in calls), (c.bias for c in calls), strict=True)
    rows = [rows_of(call.weight) for call in calls]
    outputs = apply(_Linear, calls[0].original, rows, *chain(*terms))
    return [
        output.reshape(*call.input.shape[:-1], -1)
        for output, call in zip(outputs, calls, strict=True)
    ]


@cache
def _are_rows_independent(
    rows: tuple[int, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether products with a weight have the same bits for these numbers of rows one by one as
    for all of them together. The operations of a kernel depend on shapes only, not on values."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype, device="cpu").to(device)

    weight, bias = draw(*shape), draw(shape[0])
    inputs, grads = ([draw(count, features) for count in rows] for features in shape[::-1])
    outputs = _split(linear(torch.cat(inputs), weight, bias), rows)
    of_inputs = _split(torch.cat(grads) @ weight, rows)
    return all(
        torch.equal(output, linear(x, weight, bias)) and torch.equal(of_input, grad @ weight)
        for x, grad, output, of_input in zip(inputs, grads, outputs, of_inputs, strict=True)
    )


def _split(product: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Copies: views of one tensor could not be changed in place one by one."""
    return [part.clone() for part in product.split(list(rows))]


class _Linear(torch.autograd.Function):
    """The layer for several shards. Its arguments are the function, what collects the rows of each
    shard, and then of each the input, the weight and the bias."""

    @staticmethod
    def forward(
        ctx: Any, original: Function, rows: Sequence[LinearRows], *terms: Any
    ) -> tuple[Tensor, ...]:
        inputs, weights, bias = terms[::3], terms[1::3], terms[2]
        ctx.rows = rows
        ctx.save_for_backward(*inputs, *weights)
        ctx.set_materialize_grads(False)
        counts = tuple(map(len, inputs))
        ctx.are_joined = len(inputs) > 1 and _are_rows_independent(
            counts, weights[0].shape, weights[0].dtype, weights[0].device
        )
        if ctx.are_joined:
            return tuple(_split(original(torch.cat(inputs), weights[0], bias), counts))
        return tuple(original(x, weights[0], bias) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(grads)
        inputs, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        given = [grad.contiguous() for grad in grads if grad is not None]
        flat = iter(given)
        found: list[Tensor | None] = [None] * (3 * count)
        needed = ctx.needs_input_grad[2:]
        is_differentiable = torch.is_grad_enabled()
        joined = None
        if ctx.are_joined and all(needed[::3]) and len(given) == count and not is_differentiable:
            joined = _split(torch.cat(given) @ weights[0], list(map(len, given)))
        for k, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
            if grads[k] is None:
                continue
            grad = next(flat)
            if needed[3 * k]:
                found[3 * k] = grad @ weight if joined is None else joined[k]
            if needed[3 * k + 1] and is_differentiable:
                found[3 * k + 1] = grad.t() @ x
            elif needed[3 * k + 1]:
                ctx.rows[k].add(grad, x)
            if needed[3 * k + 2]:
                found[3 * k + 2] = grad.sum(0)
        return None, None, *found


def sum_over_rows(
    weights: Mapping[int, Tensor], collected: Mapping[int, Sequence[LinearRows]], group: ShardGroup
) -> dict[int, Tensor]:
    """The gradients of these weights, of which some shard has collected rows. Collective."""
    own = {k: [rows.take() for rows in collected[k]] for k in weights}
    counts = torch.tensor(
        [[sum(map(len, grads)) for grads, _ in shards] for shards in own.values()], device="cpu"
    )
    by_rank = torch.stack([each.sum(1) for each in group.transport.all_gather(counts)]).tolist()
    products: dict[int, _Product] = {}
    for index, (k, shards) in enumerate(own.items()):
        rows = [rank[index] for rank in by_rank]
        if any(rows):
            products[k] = _Product(weights[k], shards, rows, group)
    for dtype in dict.fromkeys(product.dtype for product in products.values()):
        members = [product for product in products.values() if product.dtype == dtype]
        _exchange([product.rows_by_rank for product in members], group)
        for product in members:
            product.compute_own_blocks()
        _exchange([product.blocks_by_rank for product in members], group)
    return {k: product.gradient for k, product in products.items()}


class _Product:
    """The gradient of one weight, while it is computed."""

    def __init__(
        self,
        weight: Tensor,
        shards: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
        rows: Sequence[int],
        group: ShardGroup,
    ) -> None:
        self.dtype = weight.dtype
        self.gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._grads = weight.new_empty(sum(rows), weight.shape[0])
        self._inputs = weight.new_empty(sum(rows), weight.shape[1])
        by_rank = list(
            zip(*(x.split(list(rows)) for x in (self._grads, self._inputs)), strict=True)
        )
        self.rows_by_rank = [[part.view(-1) for part in parts] for parts in by_rank]
        rank = group.transport.rank
        if rows[rank]:
            for found, own in zip(zip(*shards, strict=True), by_rank[rank], strict=True):
                torch.cat(list(chain(*found)), out=own)
        columns = self._grads.tensor_split(group.size, dim=1)
        blocks = self.gradient.tensor_split(group.size)
        self._own = [(columns[shard], blocks[shard]) for shard in group.own]
        flat, each = [block.view(-1) for block in blocks], len(group.own)
        self.blocks_by_rank = [flat[k : k + each] for k in range(0, group.size, each)]

    def compute_own_blocks(self) -> None:
        """This rank's blocks of the gradient, from the rows of all."""
        for grads, block in self._own:
            torch.mm(grads.t(), self._inputs, out=block)


def _exchange(parts: Sequence[Sequence[Sequence[Tensor]]], group: ShardGroup) -> None:
    """Overwrite the parts of other ranks with theirs, of several products. Collective."""
    by_rank = zip(*parts, strict=True)
    group.transport.all_gather_each([list(chain(*own)) for own in by_rank])
