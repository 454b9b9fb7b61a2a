"""The gradients of large weights of linear layers and convolutions, by one product of the rows of
all shards.

The gradient of a weight is a product of the gradients of the layer's outputs and its inputs. A
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply
from instep.process.patching import Function
from instep.process.torch_private.autograd import current_graph_task_id, peek_interpreter_stack
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.weighted_layers import WeightedLayer

_DTYPES = (torch.float32, torch.float64)
_LEAST_BYTES = 1 << 20
"""Sums over shards of smaller weights stay in a cache, and take less time than messages do."""
_ATTRIBUTE = "_instep_collected_rows"


class _RowKind(NamedTuple):
    """What rows have in common that one product can take."""

    layer: WeightedLayer
    grad_shape: tuple[int, ...]
    """That of the gradient of a row of outputs."""
    input_shape: tuple[int, ...]


class CollectedRows:
    """What a backward has found for one weight on one shard: the gradients of the rows of outputs,
    and the rows of inputs."""

    def __init__(self, index: int, most: int) -> None:
        self.index = index
        """That of the weight among the parameters of the sharded call."""
        self.most = most
        """With more elements than these in the inputs and outputs of a call of the layer, its
        weight is no larger than they."""
        self._found: list[tuple[int, _RowKind, Tensor, Tensor]] = []

    def add(self, layer: WeightedLayer, grads: Tensor, inputs: Tensor) -> None:
        """Add one call's gradients (rows, out, ...) and inputs (rows, in, ...) of the layer."""
        kind = _RowKind(layer, tuple(grads.shape[1:]), tuple(inputs.shape[1:]))
        self._found.append((current_graph_task_id(), kind, grads, inputs))

    def take(self) -> list[tuple[_RowKind, Tensor, Tensor]]:
        """What was added during the backward under way, and forget all."""
        task = current_graph_task_id()  # others' did not go on to the weights
        found, self._found = self._found, []
        return [(kind, grads, x) for number, kind, grads, x in found if number == task]


def collect_rows(
    parameters: Sequence[Tensor], aliases: Sequence[Sequence[Tensor]], group: ShardGroup
) -> dict[int, list[CollectedRows]]:
    """Where the aliases of large weights leave their rows: by index of the parameter, of each shard
    of this rank."""
    found: dict[int, list[CollectedRows]] = {}
    for k, parameter in enumerate(parameters):
        if parameter.dim() < 2 or parameter.dtype not in _DTYPES:
            continue
        if parameter.nbytes >= _LEAST_BYTES and len(parameter) >= group.size:
            most = parameter.numel() // group.size
            found[k] = [CollectedRows(k, most) for _ in aliases]
            for own, rows in zip(aliases, found[k], strict=True):
                setattr(own[k], _ATTRIBUTE, rows)
    return found


def rows_of(weight: Tensor) -> CollectedRows | None:
    """Where an alias of a large weight leaves its rows; None for any other tensor."""
    return getattr(weight, _ATTRIBUTE, None)


@dataclass
class LayerCall:
    """A call of a layer with the alias of a large weight."""

    original: Function
    """Of torch."""
    layer: WeightedLayer
    input: Tensor
    """(rows, in, ...)"""
    weight: Tensor
    bias: Tensor | None

    def is_collected(self, rows: CollectedRows) -> bool:
        """Whether its rows are collected there."""
        x, weight = self.input, self.weight
        return (
            torch.is_grad_enabled()
            and type(x) is Tensor
            and (x.dtype, x.dim()) == (weight.dtype, weight.dim())
            and x.is_contiguous()
            and weight.is_contiguous()
            and 0 < x.numel() <= rows.most - self.layer.output_numel(x, weight)
            and not torch.is_autocast_enabled(x.device.type)
            and peek_interpreter_stack() is None  # no transform of torch.func
        )


def outputs_of_shards(calls: Sequence[LayerCall]) -> Sequence[Tensor]:
    """What the calls of several shards return, in one node of the autograd graph.

    They are calls of one layer, whose inputs differ in their numbers of rows only.
    """
    rows = [rows_of(call.weight) for call in calls]
    terms = chain(*((call.input, call.weight, call.bias) for call in calls))
    outputs: tuple[Tensor, ...] = apply(_Joint, calls[0].original, calls[0].layer, rows, *terms)
    return outputs


@cache
def _are_rows_independent(
    original: Function,
    layer: WeightedLayer,
    rows: tuple[int, ...],
    input_shape: torch.Size,
    weight_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether products with a weight have the same bits for these numbers of rows one by one as
    for all of them together. The operations of a kernel depend on shapes only, not on values."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype, device="cpu").to(device)

    weight, bias = draw(*weight_shape), draw(weight_shape[0])
    inputs = [draw(count, *input_shape) for count in rows]
    outputs = _split(layer.output(original, torch.cat(inputs), weight, bias), rows)
    grads = [draw(*output.shape) for output in outputs]
    of_inputs = _split(layer.input_grad(torch.cat(grads), torch.cat(inputs), weight), rows)
    return all(
        torch.equal(output, layer.output(original, x, weight, bias))
        and torch.equal(of_input, layer.input_grad(grad, x, weight))
        for x, grad, output, of_input in zip(inputs, grads, outputs, of_inputs, strict=True)
    )


def _split(product: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Copies: views of one tensor could not be changed in place one by one."""
    return [part.clone() for part in product.split(list(rows))]


class _Joint(torch.autograd.Function):
    """A layer for several shards. Its arguments are torch's function, the layer, what collects the
    rows of each shard, and then of each the input, the weight and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        original: Function,
        layer: WeightedLayer,
        rows: Sequence[CollectedRows],
        *terms: Any,
    ) -> tuple[Tensor, ...]:
        inputs, weights, bias = terms[::3], terms[1::3], terms[2]
        ctx.layer, ctx.rows = layer, rows
        ctx.save_for_backward(*inputs, *weights)
        ctx.set_materialize_grads(False)
        counts = tuple(map(len, inputs))
        x, weight = inputs[0], weights[0]
        ctx.are_joined = len(inputs) > 1 and _are_rows_independent(
            original, layer, counts, x.shape[1:], weight.shape, weight.dtype, weight.device
        )
        if ctx.are_joined:
            return tuple(_split(layer.output(original, torch.cat(inputs), weight, bias), counts))
        return tuple(layer.output(original, x, weight, bias) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count, layer = len(grads), ctx.layer
        inputs, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        given = [grad.contiguous() for grad in grads if grad is not None]
        flat = iter(given)
        found: list[Tensor | None] = [None] * (3 * count)
        needed = ctx.needs_input_grad[3:]
        is_differentiable = torch.is_grad_enabled()
        joined = None
        if ctx.are_joined and all(needed[::3]) and len(given) == count and not is_differentiable:
            of_all = layer.input_grad(torch.cat(given), torch.cat(inputs), weights[0])
            joined = _split(of_all, list(map(len, given)))
        for k, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
            if grads[k] is None:
                continue
            grad = next(flat)
            if needed[3 * k]:
                found[3 * k] = layer.input_grad(grad, x, weight) if joined is None else joined[k]
            if needed[3 * k + 1] and is_differentiable:
                found[3 * k + 1] = layer.weight_grad(grad, x, weight)
            elif needed[3 * k + 1]:
                ctx.rows[k].add(layer, grad, x)
            if needed[3 * k + 2]:
                found[3 * k + 2] = layer.bias_grad(grad)
        return None, None, None, *found


def sum_over_rows(
    weights: Mapping[int, Tensor],
    collected: Mapping[int, Sequence[CollectedRows]],
    group: ShardGroup,
) -> dict[int, Tensor]:
    """The gradients of these weights, of which some shard has collected rows. Collective."""
    own: dict[tuple[int, _RowKind], list[tuple[Tensor, Tensor]]] = {}
    for k in weights:
        for shard in collected[k]:
            for kind, grads, inputs in shard.take():
                own.setdefault((k, kind), []).append((grads, inputs))
    counts = {key: sum(len(grads) for grads, _ in found) for key, found in own.items()}
    by_rank = group.transport.all_gather_object(counts)
    products = [
        _Product(k, kind, weights[k], own.get((k, kind), []), rows, group)
        for k, kind in sorted(set(chain(*by_rank)), key=str)
        if any(rows := [of_rank.get((k, kind), 0) for of_rank in by_rank])
    ]
    for dtype in dict.fromkeys(product.dtype for product in products):
        members = [product for product in products if product.dtype == dtype]
        _exchange([product.rows_by_rank for product in members], group)
        for product in members:
            product.compute_own_blocks()
        _exchange([product.blocks_by_rank for product in members], group)
    gradients: dict[int, Tensor] = {}
    for product in products:
        before = gradients.get(product.index)
        gradients[product.index] = product.gradient if before is None else before + product.gradient
    return gradients


class _Product:
    """The gradient of a weight from the rows of one kind, while it is computed."""

    def __init__(
        self,
        index: int,
        kind: _RowKind,
        weight: Tensor,
        own: Sequence[tuple[Tensor, Tensor]],
        rows: Sequence[int],
        group: ShardGroup,
    ) -> None:
        self.index = index
        self.dtype = weight.dtype
        self.gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._layer = kind.layer
        self._grads = weight.new_empty(sum(rows), *kind.grad_shape)
        self._inputs = weight.new_empty(sum(rows), *kind.input_shape)
        by_rank = list(
            zip(*(x.split(list(rows)) for x in (self._grads, self._inputs)), strict=True)
        )
        self.rows_by_rank = [[part.view(-1) for part in parts] for parts in by_rank]
        if own:
            for found, place in zip(
                zip(*own, strict=True), by_rank[group.transport.rank], strict=True
            ):
                torch.cat(found, out=place)
        columns = self._grads.tensor_split(group.size, dim=1)
        blocks = self.gradient.tensor_split(group.size)
        self._own = [(columns[shard], blocks[shard]) for shard in group.own]
        flat, each = [block.view(-1) for block in blocks], len(group.own)
        self.blocks_by_rank = [flat[k : k + each] for k in range(0, group.size, each)]

    def compute_own_blocks(self) -> None:
        """This rank's blocks of the gradient, from the rows of all."""
        for grads, block in self._own:
            self._layer.write_weight_grad(grads, self._inputs, block)


def _exchange(parts: Sequence[Sequence[Sequence[Tensor]]], group: ShardGroup) -> None:
    """Overwrite the parts of other ranks with theirs, of several products. Collective."""
    by_rank = zip(*parts, strict=True)
    group.transport.all_gather_each([list(chain(*own)) for own in by_rank])
