"""Draws for the whole batch, of which this rank takes its own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.training.draws.batch_dims import BatchDims, Dim, Shape
from instep.training.draws.kernels import DrawMode
from instep.training.draws.replica_draws import BatchDraw
from instep.training.forward_calls import ForwardCall, note_shape
from instep.training.random_streams import default_generators, derive_seed


class BatchDrawMode(DrawMode):
    """While this is on, random operations draw for the whole batch, from a stream of their own.

    Nothing is exchanged with other ranks: each draws all numbers. The k-th operation begins with a
    seed of its own, so that one of which each rank draws its own moves no other.
    """

    def __init__(self, draw: BatchDraw, call: ForwardCall | None) -> None:
        super().__init__(self._run)
        self._draw, self._call, self._count = draw, call, 0
        assert draw.block is not None
        self._block = draw.block
        self._rows = max(self._block.count, 1)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._seed()
        name = func._schema.name.removeprefix("aten::").removesuffix("_functional")
        first: Any = args[0] if args else None
        if name == "native_dropout":
            return self._dropout(first, *args[1:])
        if name == "rrelu_with_noise":
            return self._rrelu(func, *args)
        if name == "multinomial":
            return self._multinomial(func, args, kwargs)
        if name == "bernoulli":
            p = args[1] if len(args) > 1 else first
            return (self._rand(first, **kwargs) < p).to(first.dtype)
        if name == "bernoulli_" and len(args) > 1 and isinstance(args[1], Tensor):
            return first.copy_(self._rand(first, **kwargs) < args[1])
        if name == "normal" and any(isinstance(arg, Tensor) for arg in args):
            mean, std = args if len(args) == 2 else (first, kwargs.pop("std", 1.0))
            like = torch.broadcast_tensors(*(x for x in (mean, std) if isinstance(x, Tensor)))[0]
            return mean + std * self._like(like, lambda x: x.normal_(**kwargs))
        size = next((k for k, arg in enumerate(args) if isinstance(arg, list | tuple)), None)
        if size is not None and not isinstance(first, Tensor):
            shape = tuple(args[size])
            dim = self._dim(shape)
            whole = func(*args[:size], self._whole(shape, dim), *args[size + 1 :], **kwargs)
            return self._own(whole, dim)
        if isinstance(first, Tensor) and name.endswith("_like"):
            out = torch.empty_like(first, **_without_generator(kwargs))
            dim = self._dim(tuple(first.shape))
            whole = out.new_empty(self._whole(tuple(first.shape), dim))
            return out.copy_(self._own(func(whole, *args[1:], **kwargs), dim))
        if isinstance(first, Tensor) and name.endswith("_"):
            return first.copy_(self._like(first, lambda x: func(x, *args[1:], **kwargs)))
        return self._by_rank(func, args, kwargs)

    def _seed(self, *rank: int) -> None:
        for generator in default_generators():
            generator.manual_seed(derive_seed(self._draw.seed, self._count, *rank))
        self._count += 1

    def _dim(self, shape: Shape) -> int | None:
        """The dimension of the rows; as it was, if gradient checkpointing computes again."""
        k = self._count - 1
        if k not in self._draw.dims:
            self._draw.dims[k] = self._find(shape)
        dim: int | str | None = self._draw.dims[k]
        if isinstance(dim, str):
            self._seed(self._block.rank)
            return None
        if dim is not None:
            note_shape(self._call, shape, dim)
        return dim

    def _find(self, shape: Shape) -> Dim:
        if self._block.size == 1 or self._call is None or self._call.batch_dims is None:
            return None
        dims: BatchDims = self._call.batch_dims
        dim: Dim = dims.find(shape, self._rows, self._call)
        if dim != "unknown":
            return dim
        if self._call.trial is not None:
            return None
        same = (k for k, length in enumerate(shape[:2]) if length == self._rows)
        taken_for = next(same, None)
        taken = "not for rows" if taken_for is None else f"for rows (dimension {taken_for})"
        dims.warn(
            f"draws {shape} in a forward with {self._rows} rows on this rank: that is taken "
            f"{taken}, and instep cannot tell. Draw it outside, for the whole batch, and shard "
            "it: instep.shard(noise)."
        )
        return taken_for

    def _whole(self, shape: Shape, dim: int | None) -> list[int]:
        whole = list(shape)
        if dim is not None:
            whole[dim] = whole[dim] // self._rows * max(self._block.total, 1)
        return whole

    def _own(self, whole: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return whole
        per_row = whole.shape[dim] // max(self._block.total, 1)
        return whole.narrow(dim, self._block.start * per_row, self._rows * per_row).contiguous()

    def _like(self, x: Tensor, fill: Any) -> Tensor:
        """Numbers for each element of x; `fill` draws into the tensor that it gets."""
        dim = self._dim(tuple(x.shape))
        whole = x.new_empty(self._whole(tuple(x.shape), dim))
        fill(whole)
        return self._own(whole, dim)

    def _rand(self, x: Tensor, **kwargs: Any) -> Tensor:
        like = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        return self._like(like, lambda whole: whole.uniform_(**kwargs))

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        kept = self._like(x, lambda whole: whole.bernoulli_(1 - p)).bool()
        scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
        return x * kept * scale, kept

    def _rrelu(
        self,
        func: Any,
        x: Tensor,
        noise: Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        generator: Any = None,
    ) -> Any:
        if not training:
            return func(x, noise, lower, upper, training, generator)
        slopes = self._like(x, lambda whole: whole.uniform_(lower, upper, generator=generator))
        noise.copy_(slopes.masked_fill(x > 0, 1))
        return x.mul_(noise) if func._schema.name.endswith("_") else x * noise

    def _multinomial(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        weights, count, replacement = (*args, False)[:3]
        if replacement and count > 1:
            cumulated = weights.cumsum(-1)
            wanted = self._rand(weights[..., :1].expand(*weights.shape[:-1], count), **kwargs)
            return torch.searchsorted(cumulated, wanted * cumulated[..., -1:]).clamp_(
                max=weights.shape[-1] - 1
            )
        times = self._like(weights, lambda whole: whole.exponential_(**kwargs))
        chosen: Tensor = (weights / times).topk(count).indices
        return chosen

    def _by_rank(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of which no rank can draw what another one draws, unless it has no rows."""
        name = func._schema.name.removeprefix("aten::")
        first: Any = args[0]
        dim = self._dim(tuple(first.shape) if isinstance(first, Tensor) else (first,))
        if dim is not None and self._call is not None:
            self._seed(self._block.rank)
            self._call.batch_dims.warn(
                f"calls torch.{name} with the rows of the batch: each rank draws its own, so the "
                "numbers are not those of one process. Draw them outside, for the whole batch, "
                "and shard them: instep.shard(noise)."
            )
        return func(*args, **kwargs)


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "generator"}
