"""Random numbers in a sharded call: those of the whole batch.

The generators are in the same state on all ranks. Whatever is drawn with one entry per row is drawn
for all rows, of which the rank takes its own: what one process would have drawn, to the bit, and
the generators are in step afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.process.torch_private.tensors import tree_flatten, tree_map_only, tree_unflatten
from instep.training.blocks import Block
from instep.training.draws import bernoulli
from instep.training.draws.kernels import intercepted_draws
from instep.training.draws.operations import Draws, draws_of
from instep.training.random_streams import default_generators
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.plan.sharding_plan import Draw, DrawRows, MemoryOrder
from instep.unedited.sharded_call.run.mappings import gather_rows, memory_order, scatter_to_region
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.shard_threads import Joint

_FUSED_ATTENTION = (
    *("_scaled_dot_product_flash", "_scaled_dot_product_efficient", "_scaled_dot_product_cudnn"),
    *("_flash_attention", "_efficient_attention", "_cudnn_attention"),
)
"""How the names of attention's kernels for GPUs begin."""
_SEED = (-(2**63), 2**63 - 1)
"""Between these inductor draws a seed for what it has compiled."""


class UnknownDrawError(Exception):
    """A divided call draws more often than those that were compared, and it is not known what."""


class TorchGeneratorStates:
    """The states of torch's global generators and of others of its kind."""

    def __init__(self, others: Sequence[torch.Generator] = ()) -> None:
        self._others = others
        self._states = [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        return [*self._others, *default_generators()]

    def same(self, other: TorchGeneratorStates) -> bool:
        """Whether nothing was drawn between the two."""
        # As many as both have: CUDA may have started meanwhile.
        return all(map(torch.equal, self._states, other._states))

    def restore(self) -> None:
        """Set the generators back, so that they draw the same again."""
        for generator, state in zip(self._generators(), self._states, strict=False):
            generator.set_state(state)


class WholeDraw(NamedTuple):
    """The tensor of a draw for the whole batch."""

    shape: Sequence[int]
    order: MemoryOrder


@dataclass
class DrawRowDims:
    """The dimensions in which draws have rows, where the part's shape alone misleads: a length
    that is no batch may equal the part's rows, or a multiple of them."""

    whole: Mapping[Draw, WholeDraw] = field(default_factory=dict)
    """What the whole forward draws, while a sharded one is compared with it."""
    found: Mapping[Draw, DrawRows] = field(default_factory=dict)

    def of(self, draw: Draw, shape: Sequence[int], block: Block, dims: Sequence[int]) -> int | None:
        """The dimension of the rows of `block` in this draw of a sharded forward; those of `dims`
        are the likely ones."""
        whole = self.whole.get(draw)
        if whole is not None and whole.shape and len(whole.shape) == len(shape):
            differing = [dim for dim, length in enumerate(shape) if length != whole.shape[dim]]
            if len(differing) < 2:
                dim = differing[0] if differing else None
                self.found = {
                    **self.found,
                    draw: DrawRows(dim, whole.order, _of_sample(shape, dim, block)),
                }
        known = self.found.get(draw) or self._find_alike(draw, shape, block)
        if known is not None and (known.dim is None or shape[known.dim] % block.count == 0):
            return known.dim
        return _likely_row_dim(shape, block, dims)

    def _find_alike(self, draw: Draw, shape: Sequence[int], block: Block) -> DrawRows | None:
        """An earlier draw like this one, which a loop repeats more often than in the calls that
        were compared. Raises UnknownDrawError where some have rows in it and others do not."""
        alike = [rows for each, rows in self.found.items() if each[1:] == draw[1:]]
        same = [x for x in alike if x.of_sample == _of_sample(shape, x.dim, block)] or alike
        if len({rows.dim for rows in same}) > 1:
            raise UnknownDrawError(f"{draw.op} may draw rows, or something else")
        return same[0] if same else None

    def order_of(self, draw: Draw, local: Tensor, dim: int) -> MemoryOrder:
        """The memory order of a draw for the whole batch; `local` is that for this rank's rows."""
        if draw in self.found and local.shape[dim] == 1:
            return self.found[draw].order
        return memory_order(local)


def _of_sample(shape: Sequence[int], dim: int | None, block: Block) -> tuple[float, ...]:
    return tuple(x / block.count if k == dim else x for k, x in enumerate(shape))


def _likely_row_dim(shape: Sequence[int], block: Block, dims: Sequence[int]) -> int | None:
    """The dimension in which this has one entry, or some, per row, by its shape."""
    for dim in dims:
        if len(shape) > dim and shape[dim] == block.count:
            return dim
    return 0 if len(shape) and shape[0] and shape[0] % block.count == 0 else None


class _RandomCall(NamedTuple):
    """A call of a random operation."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Draw
    shape: Sequence[int]
    """Of what is drawn; () where it is not known."""


def intercepted_calls(run: Callable[[_RandomCall], Any]) -> AbstractContextManager[object]:
    """Inside, `run` runs random operations."""
    numbers = count()

    def run_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = func._schema.name.removeprefix("aten::")
        shape = _shape(op, args, kwargs)
        return run(_RandomCall(func, args, kwargs, Draw(next(numbers), op, len(shape)), shape))

    return intercepted_draws(run_draw)


def noted_draws(found: dict[Draw, WholeDraw]) -> AbstractContextManager[object]:
    """Inside, `found` gets what is drawn."""

    def run(call: _RandomCall) -> Any:
        first = call.args[0] if call.args else call.kwargs.get("self")
        in_order = (*range(len(call.shape)),)
        order = memory_order(first) if isinstance(first, Tensor) else in_order
        found[call.draw] = WholeDraw(call.shape, order)
        return call.func(*call.args, **call.kwargs)

    return intercepted_calls(run)


class GlobalBatchDraws:
    """Random operations that draw for the whole batch: once for all shards of this rank, which meet
    there. Its method `run` is for `intercepted_calls`."""

    def __init__(
        self,
        blocks: Sequence[Block],
        batch_dim: int,
        group: ShardGroup,
        row_dims: DrawRowDims,
        meet: Callable[[_RandomCall, Joint], Any],
    ) -> None:
        self._blocks, self._group, self._meet = blocks, group, meet
        self._dims = (batch_dim, 1 - batch_dim)
        self._row_dims = row_dims

    def run(self, call: _RandomCall) -> Any:
        """What this shard draws. Raises ShardedCallError where a kernel or compiled code draws
        inside."""
        if call.draw.op.startswith(_FUSED_ATTENTION):
            raise ShardedCallError(
                f"{call.draw.op} drops out by a row's place in the batch, inside of the kernel "
                '(with SDPBackend.MATH, in transformers attn_implementation="eager", it is divided)'
            )
        numbers = tuple(arg for arg in call.args if isinstance(arg, int))
        if numbers == _SEED:
            raise ShardedCallError(
                "what torch.compile has made of it draws by a row's place in the batch (with "
                "torch._inductor.config.fallback_random = True it draws as without torch.compile, "
                "and is divided)"
            )
        return self._meet(call, self._draw)

    def _draw(self, calls: Sequence[_RandomCall]) -> Sequence[Any]:
        """What each shard draws."""
        func, args, kwargs, draw, shape = calls[0]
        dim = self._row_dims.of(draw, shape, self._blocks[0], self._dims)
        if dim is None:
            return self._draw_same(calls)
        if _is_factory(draw.op, args, kwargs):
            at = _place_of_size(args)
            whole = func(*args[:at], self._whole_shape(args[at], dim), *args[at + 1 :], **kwargs)
            return self._scatter(whole, dim)
        firsts = [call.args[0] if call.args else call.kwargs["self"] for call in calls]
        order = self._row_dims.order_of(draw, firsts[0], dim)
        make_whole = partial(
            torch.empty_permuted, self._whole_shape(shape, dim), order, device=firsts[0].device
        )
        if draw.op == "bernoulli_":
            p = args[1] if len(args) > 1 else 0.5
            if bernoulli.can_compare(firsts[0], p):
                is_in_rows = dim == 0 and order == (*range(len(shape)),)
                if is_in_rows and bernoulli.can_pass_over(firsts):
                    return self._bernoulli_of_rows(firsts, p, **kwargs)
                return self._bernoulli(make_whole(dtype=torch.int64), dim, firsts, p, **kwargs)
        from_end = dim - len(shape)  # as arguments broadcast
        if draws_of(draw.op) is Draws.VALUES:
            first = self._gather(firsts, from_end, shape)
        else:
            first = make_whole(dtype=firsts[0].dtype)
        if draws_of(draw.op) is Draws.MASK:
            return self._dropout(func, first, dim, firsts, *args[1:])
        others = [
            self._gather([call.args[k] for call in calls], from_end, shape)
            for k in range(1, len(args))
        ]
        return self._draw_from(calls, firsts, [first, *others], dim)

    def _draw_from(
        self, calls: Sequence[_RandomCall], firsts: Sequence[Tensor], whole: list[Any], dim: int
    ) -> Sequence[Any]:
        """What each shard draws of what is drawn with these arguments for the whole batch.

        `firsts`: the shards' own first arguments, into which an operation in place draws.
        """
        func, _, kwargs, draw, _ = calls[0]
        drawn = func(*whole, **kwargs)
        if draw.op.startswith("rrelu_with_noise") and not draw.op.endswith("functional"):
            for call, noise in zip(calls, self._scatter(whole[1], dim), strict=True):
                call.args[1].copy_(noise)  # for its derivative
        if draw.op.endswith("_"):
            parts = self._scatter(whole[0], dim)
            return [first.copy_(part) for first, part in zip(firsts, parts, strict=True)]
        flat, structure = tree_flatten(drawn)
        by_leaf = [
            self._scatter(leaf, dim) if isinstance(leaf, Tensor) else [leaf] * len(calls)
            for leaf in flat
        ]
        return [tree_unflatten(leaves, structure) for leaves in zip(*by_leaf, strict=True)]

    def _draw_same(self, calls: Sequence[_RandomCall]) -> Sequence[Any]:
        """What has no rows is drawn once."""
        first, *others = calls
        drawn = first.func(*first.args, **first.kwargs)
        results = [drawn]
        for call in others:
            if first.draw.op.endswith("_"):
                results.append(call.args[0].copy_(drawn))
            else:
                results.append(tree_map_only(Tensor, Tensor.clone, drawn))
        return results

    def _dropout(
        self,
        func: Any,
        whole: Tensor,
        dim: int,
        inputs: Sequence[Tensor],
        p: float,
        train: bool | None,
    ) -> Sequence[tuple[Tensor, Tensor]]:
        masks = self._scatter(func(whole.zero_(), p, train)[1], dim)
        scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
        return [(x * mask * scale, mask) for x, mask in zip(inputs, masks, strict=True)]

    def _bernoulli(
        self,
        whole: Tensor,
        dim: int,
        outs: Sequence[Tensor],
        p: float,
        generator: torch.Generator | None = None,
    ) -> Sequence[Tensor]:
        parts = self._scatter(bernoulli.draw_bits(whole, generator), dim)
        return [bernoulli.compare(bits, p, out) for bits, out in zip(parts, outs, strict=True)]

    def _bernoulli_of_rows(
        self, outs: Sequence[Tensor], p: float, generator: torch.Generator | None = None
    ) -> Sequence[Tensor]:
        first, last = self._blocks[0], self._blocks[-1]
        of_sample = outs[0].numel() // first.count
        before, after = first.start * of_sample, (last.total - last.stop) * of_sample
        bernoulli.draw_ones(outs, before, after, p, generator)
        return outs

    def _whole_shape(self, shape: Any, dim: int) -> list[int]:
        whole, block = list(shape), self._blocks[0]
        whole[dim] = whole[dim] // block.count * block.total
        return whole

    def _gather(self, args: Sequence[Any], from_end: int, shape: Sequence[int]) -> Any:
        """The whole of an argument that broadcasts with `shape`, if it has rows."""
        first = args[0]
        if not isinstance(first, Tensor) or first.dim() < -from_end:
            return first
        dim = first.dim() + from_end
        if first.shape[dim] != shape[from_end]:
            return first
        return gather_rows(args, self._blocks, dim, self._group)

    def _scatter(self, whole: Tensor, dim: int) -> Sequence[Tensor]:
        return scatter_to_region(whole, self._blocks, dim, self._group)


def _shape(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The shape of what is drawn; () where it is not known."""
    if _is_factory(name, args, kwargs):
        return tuple(args[_place_of_size(args)])
    first = args[0] if args else kwargs.get("self")
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def _is_factory(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it makes a tensor of a size; torch.normal does so in some of its forms."""
    first = args[0] if args else kwargs.get("self")
    return draws_of(name) is Draws.SIZE or (
        not isinstance(first, Tensor) and any(isinstance(arg, list | tuple) for arg in args)
    )


def _place_of_size(args: Sequence[Any]) -> int:
    return next(k for k, arg in enumerate(args) if isinstance(arg, list | tuple))
