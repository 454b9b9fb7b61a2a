"""Indices out of range are an error before the operation runs, on any device.

A forward that is tried with a part of its rows may index them by places in the whole batch, as in
`x[edges]`. On the CPU that is an IndexError. On a GPU the kernel finds it when the host has gone
on, and the process cannot use the GPU any more. So in a trial the host reads the indices first,
and waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from instep.process.torch_private.compiler import skip_methods
from instep.process.torch_private.dispatch import KernelMode

_Arguments = Mapping[str, Any]
"""Of an operation of torch.ops.aten, by name."""


@skip_methods
class IndexChecks(KernelMode):
    """Inside, on this thread, an operation raises an IndexError or RuntimeError before it runs if
    its kernel for GPUs would find its values out of range."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor for kind in types):  # what these make of it is seen then
            return NotImplemented
        schema: Any = getattr(func, "_schema", None)  # there are operations without one
        check = None if schema is None else _CHECKS.get(schema.name.removeprefix("aten::"))
        if check is not None:
            given = {each.name: each.default_value for each in schema.arguments}
            check({**given, **dict(zip(given, args, strict=False)), **kwargs})
        return func(*args, **kwargs)


def _limits(tensor: Any) -> tuple[float, float] | None:
    """Its least and its greatest number; None where it has none."""
    if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
        return None
    least, greatest = torch.stack(torch.aminmax(tensor)).tolist()
    return least, greatest


def _outside(tensor: Any, least: float, greatest: float) -> float | None:
    """The number of this tensor that is furthest from these limits; None if all are within."""
    found = _limits(tensor)
    if found is None or (least <= found[0] and found[1] <= greatest):
        return None
    return found[0] if found[1] <= greatest else found[1]


def _require(index: Any, size: int, dim: int = 0, *, from_end: bool = False) -> None:
    """`from_end`: whether -1 is the last one."""
    wrong = _outside(index, -size if from_end else 0, size - 1)
    if wrong is not None:
        raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {size}")


def _check_tensors(given: _Arguments) -> None:
    values, dim = given["self"], 0
    for index in given["indices"]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask and dim < values.dim():
            _require(index, values.shape[dim], dim, from_end=True)
        dim += index.dim() if is_mask else 1  # the host knows the shape of a mask


def _check_dim(given: _Arguments, *, from_end: bool = False) -> None:
    shape, dim = given["self"].shape or (1,), given["dim"]
    _require(given["index"], shape[dim], dim % len(shape), from_end=from_end)


def _check_flat(given: _Arguments) -> None:
    count = given["self"].numel()
    if (wrong := _outside(given["index"], -count, count - 1)) is not None:
        raise IndexError(
            f"out of range: tried to access index {wrong} on a tensor of {count} elements."
        )


def _check_embedding(given: _Arguments) -> None:
    table = given["weight"] if "weight" in given else given["self"]
    _require(given["indices"], len(table))


def _check_bags(given: _Arguments) -> None:
    _check_embedding(given)
    _check_offsets(given["offsets"], given["indices"].numel())


def _check_offsets(offsets: Any, length: int) -> None:
    if _limits(offsets) is None:
        return
    rows = offsets.tolist()
    if rows[0] != 0:
        raise RuntimeError(f"offsets[0] has to be 0, but it is {rows[0]}")
    if rows[-1] > length:
        raise RuntimeError(
            f"offsets[-1] can not be greater than input's length {length} but got offsets[-1] of "
            f"{rows[-1]}"
        )
    if sorted(rows) != rows:
        raise RuntimeError("offsets must not decrease")


def _check_segments(given: _Arguments) -> None:
    offsets, length = given["offsets"], given["data"].shape[given["axis"]]
    if _outside(offsets, 0, length) is not None:
        raise RuntimeError(f"offsets are not within the {length} rows")
    if isinstance(offsets, Tensor) and _outside(offsets.diff(), 0, length) is not None:
        raise RuntimeError("offsets must not decrease")


def _check_targets(given: _Arguments) -> None:
    target, ignored = given["target"], given["ignore_index"]
    if _limits(target) is not None:
        target = target[target != ignored]
    _require_classes(target, given["self"].shape[min(1, given["self"].dim() - 1)])


def _check_margins(given: _Arguments, *, least: int = 0) -> None:
    _require_classes(given["target"], (given["self"].shape or (1,))[-1], least=least)


def _require_classes(target: Tensor, classes: int, *, least: int = 0) -> None:
    if (wrong := _outside(target, least, classes - 1)) is not None:
        raise IndexError(f"Target {wrong} is out of bounds.")


def _check_repeats(given: _Arguments) -> None:
    if "self" in given:
        return  # it is made up of the one without
    repeats, size = given["repeats"], given["output_size"]
    if _outside(repeats, 0, float("inf")) is not None:
        raise RuntimeError("repeats can not be negative")
    if size is not None and not repeats.is_meta and int(repeats.sum()) != size:
        raise RuntimeError("allocated size does not match required size")


def _check_mask(given: _Arguments) -> None:
    values, mask, source = given["self"], given["mask"], given["source"]
    if mask.is_meta:
        return
    shape = torch.broadcast_shapes(values.shape, mask.shape)
    if int(mask.expand(shape).sum()) > source.numel():
        raise RuntimeError("Number of elements of source < number of ones in mask")


def _check_assertion(given: _Arguments) -> None:
    if not given["self"].is_meta and not given["self"]:
        raise RuntimeError(given.get("assert_msg", "Expected Tensor with single nonzero value"))


def _check_unit_interval(given: _Arguments) -> None:
    for name in ("self", "target"):
        if _outside(given[name], 0, 1) is not None:
            what = "input" if name == "self" else name
            raise RuntimeError(f"all elements of {what} should be between 0 and 1")


def _check_chances(given: _Arguments) -> None:
    if _outside(given.get("p", given["self"]), 0, 1) is not None:
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


def _check_weights(given: _Arguments) -> None:
    weights = given["self"]
    if _outside(weights, 0, torch.finfo(weights.dtype).max) is not None:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not weights.is_meta and bool((weights.sum(-1) <= 0).any()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


_CHECKS: dict[str, Callable[[_Arguments], None]] = {
    name: check
    for names, check in (
        ("index index_put index_put_ _index_put_impl_ _unsafe_index", _check_tensors),
        ("_unsafe_index_put", _check_tensors),
        ("gather index_select scatter scatter_ scatter_add scatter_add_", _check_dim),
        ("scatter_reduce scatter_reduce_ index_add index_add_ index_copy", _check_dim),
        ("index_copy_ index_reduce index_reduce_", _check_dim),
        ("index_fill index_fill_", partial(_check_dim, from_end=True)),
        ("take put put_", _check_flat),
        ("embedding embedding_renorm_", _check_embedding),
        ("_embedding_bag _embedding_bag_forward_only", _check_bags),
        ("segment_reduce", _check_segments),
        ("nll_loss_forward nll_loss2d_forward", _check_targets),
        ("multi_margin_loss", _check_margins),
        ("multilabel_margin_loss_forward", partial(_check_margins, least=-1)),  # -1 ends a list
        ("repeat_interleave", _check_repeats),
        ("masked_scatter masked_scatter_", _check_mask),
        ("_assert_async _functional_assert_async", _check_assertion),
        ("binary_cross_entropy", _check_unit_interval),
        ("bernoulli bernoulli_", _check_chances),
        ("multinomial", _check_weights),
    )
    for name in names.split()
}
"""By operations whose kernels for GPUs end in an assertion there, or read what is not theirs."""
