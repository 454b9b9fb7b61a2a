"""The proof that a module's call may be divided: the whole forward and the divided one are made
from the same state and compared: outputs, what they leave behind, gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.training.blocks import Block
from instep.training.pytree import Unchanged, find_tensors, flatten, is_column, leaves_of, unflatten
from instep.unedited.errors import UndividedError
from instep.unedited.sharded_call import region as regions
from instep.unedited.sharded_call.checked_transport import attempt
from instep.unedited.sharded_call.compiled import is_compiled, keep_buffers
from instep.unedited.sharded_call.division import Division, divisions
from instep.unedited.sharded_call.grad_sums import is_alias
from instep.unedited.sharded_call.mappings import came_in
from instep.unedited.sharded_call.perturbation import AT_MOST, GRADIENT_AT_MOST, allowed, shaken
from instep.unedited.sharded_call.plan import Call, Output, Plan, join
from instep.unedited.sharded_call.rank_mismatch import told_apart
from instep.unedited.sharded_call.region import Region
from instep.unedited.sharded_call.rounding import (
    Pull,
    gradient_tolerance,
    gradients_apart,
    tolerance,
    tolerance_of,
)
from instep.unedited.sharded_call.snapshot import Snapshot, apart


@dataclass(frozen=True)
class Noise:
    """How far a call is from itself, where only rounding differs."""

    outputs: list[float]
    buffers: float
    gradients: list[float]


class Whole:
    """The whole forward of a call, and what it left behind."""

    def __init__(self, call: Call) -> None:
        self.before = Snapshot(call.module, call.leaves)
        given = Unchanged((call.args, call.kwargs))
        self.value = call.whole()
        self.after = Snapshot(call.module, call.leaves)
        self.outputs, self.structure = flatten(self.value)
        self.changes_arguments = not given
        self.drawing = self.before.draws(self.after)
        """Whether it drew random numbers."""
        self.pull: Pull | None = None
        self.gradients: list[Tensor | None] = []
        self.noise: Noise | None = None
        self.in_doubt = False
        """Whether a divided call was so near that rounding may be what separates them."""

    def differentiate(self, call: Call) -> None:
        """Find the gradients that it gives: now, while what autograd has saved is as it was."""
        if self.pull is None:
            self.pull = Pull.of(call, self.outputs)
            self.gradients = self.pull.through(self.outputs)

    def measure(self, call: Call) -> None:
        """Find how far it is from itself, where only rounding differs."""
        self.before.restore()
        with shaken(call.module):
            outputs = leaves_of(call.whole())
            self.noise = Noise(
                [
                    apart(again, out) if isinstance(out, Tensor) else 0.0
                    for again, out in zip(outputs, self.outputs, strict=True)
                ],
                self.after.buffers_apart(Snapshot(call.module, call.leaves)),
                gradients_apart(self.gradients, self.pull.through(outputs)) if self.pull else [],
            )

    def same_output(self, k: int, joined: Tensor) -> bool:
        """Whether these rows are those of its `k`-th output."""
        out = self.outputs[k]
        noise = self.noise.outputs[k] if self.noise else 0.0
        return self._near(apart(joined, out), tolerance_of(out), noise, AT_MOST)

    def differs(self, ours: Snapshot) -> str | None:
        """What it has left otherwise than `ours`, in words; None where it is the same."""
        noise = self.noise.buffers if self.noise else 0.0
        devices = {buffer.device.type for buffer, _ in self.after.buffers.values()}
        limit = max((tolerance(torch.float32, device) for device in devices), default=0.0)
        self._near(self.after.buffers_apart(ours), limit, noise, AT_MOST)
        return self.after.differs(ours, allowed(limit, noise, AT_MOST))

    def same_gradients(self, outputs: list[Any]) -> bool:
        """Whether these outputs give the same, as far as it was differentiated."""
        if self.pull is None:
            return True
        sizes = gradients_apart(self.gradients, self.pull.through(outputs))
        noises = self.noise.gradients if self.noise else [0.0] * len(sizes)
        limit = gradient_tolerance(outputs)
        near = [
            self._near(size, limit, noise, GRADIENT_AT_MOST)
            for size, noise in zip(sizes, noises, strict=True)
        ]
        return all(near)

    def _near(self, size: float, limit: float, noise: float, at_most: float) -> bool:
        if size <= allowed(limit, noise, at_most):
            return True
        self.in_doubt |= self.noise is None and size <= at_most
        return False


def prove(call: Call, way: Transport) -> tuple[Plan | None, Any, str]:
    """Find a plan for calls like this one.

    Returns the plan, or None where it cannot be divided; what the call returns to the script; and
    why not. Side effects are those of one forward. Collective.
    """
    if is_compiled(call.module.modules()):
        keep_buffers()
    parted = told_apart(call.module, call.leaves, way)
    call = call.looked_at()
    whole = Whole(call)
    if why := parted or _undividable(call, whole):
        return None, whole.value, why
    reasons = []
    for division in divisions(call.leaves, at_least=way.size):
        whole.differentiate(call)
        found, why = _tried(call, division, whole, way)
        if found is not None:
            return *found, ""
        reasons.append(why)
    return None, whole.value, reasons[0] if reasons else "no batch among its arguments"


def recheck(call: Call, plan: Plan, way: Transport, *, gradients: bool) -> tuple[Any, str]:
    """A planned call, compared with the whole forward once more, and its `gradients` if so wished;
    see `prove` for the results.
    """
    parted = told_apart(call.module, call.leaves, way)
    call = call.looked_at()
    whole = Whole(call)
    why = parted or _undividable(call, whole)
    if not why:
        if gradients:
            whole.differentiate(call)
        found, why = _tried(call, plan.division, whole, way)
        if found is not None:
            return found[1], ""
    return whole.value, why


def _tried(
    call: Call, division: Division, whole: Whole, way: Transport
) -> tuple[tuple[Plan, Any] | None, str]:
    """The plan and what the call returns, or why not; then all is as the whole forward left it."""
    whole.before.restore()
    found, why = attempt(lambda cautious: _try(call, division, whole, cautious), way)
    if found is not None:
        plan, joined = found
        return (plan, unflatten(joined, plan.structure)), ""
    if any(way.all_gather_object(whole.in_doubt)):
        whole.measure(call)
        whole.in_doubt = False
        return _tried(call, division, whole, way)
    whole.after.restore()
    return None, why


def _undividable(call: Call, whole: Whole) -> str:
    """What speaks against dividing it before it was tried; nothing if nothing does."""
    opaque = [out for out in whole.outputs if not isinstance(out, Tensor) and find_tensors(out)]
    if opaque:
        return (
            f"it returns a {type(opaque[0]).__name__}, into which instep does not look (return a "
            "tuple, a dict or a dataclass, or register that class with "
            "torch.utils._pytree.register_pytree_node)"
        )
    if not any(isinstance(out, Tensor) for out in whole.outputs):
        return "it returns no tensor"
    if why := whole.before.changed(whole.after):
        return why
    return "its forward changes its arguments" if whole.changes_arguments else ""


def _try(call: Call, division: Division, whole: Whole, way: Transport) -> tuple[Plan, list[Any]]:
    """Divide the call in this way. Raises UndividedError where it is not the same."""
    start = _next_sequence_number()
    region, own, structure = call.own(division, way, drawing=whole.drawing)
    if structure != whole.structure:
        raise UndividedError("its outputs have another structure for a part of the batch")
    ours = Snapshot(call.module, call.leaves)
    if why := whole.differs(ours):
        raise UndividedError(why)
    if why := _foreign_leaf(own, start):
        raise UndividedError(why)
    outputs = tuple(_output(mine, k, whole, region) for k, mine in enumerate(own))
    regions.mark(own, region)
    trial = [join(out, how, region) for out, how in zip(own, outputs, strict=True)]
    if not whole.same_gradients(trial):
        raise UndividedError("its gradients are not those of the whole batch")
    joined = [join(out, how, region) for out, how in zip(own, outputs, strict=True)]
    plan = Plan(division, outputs, structure, whole.drawing)
    if plan.has_sums and not _holds_for_others(call, plan, whole.before, way):
        raise UndividedError("it divides by something else than its rows")
    ours.restore()  # what was computed since has left traces
    return plan, joined


def _holds_for_others(call: Call, plan: Plan, before: Snapshot, way: Transport) -> bool:
    """Whether a plan with means or sums over rows also holds for other arguments.

    A mean over kept tokens looks like one over rows as long as all are kept. So about half of what
    came in is set to zero, which is as good a class, token or mask as any.
    """
    generator = torch.Generator().manual_seed(0)

    def altered(leaf: Any, dim: int | None) -> Any:
        if dim is None or not isinstance(leaf, Tensor) or leaf.requires_grad:
            return leaf
        kept = torch.rand(leaf.shape, generator=generator) < 0.5
        return leaf.where(kept.to(leaf.device), torch.zeros_like(leaf))

    leaves = [altered(*pair) for pair in zip(call.leaves, plan.division.dims, strict=True)]
    other = call.with_leaves(leaves)
    before.restore()
    wholes, structure = flatten(other.whole())
    before.restore()
    region, own, own_structure = other.own(plan.division, way, drawing=plan.drawing)
    return structure == own_structure and all(
        not isinstance(whole, Tensor)
        or apart(join(out.detach(), how, region), whole) <= tolerance_of(whole)
        for out, how, whole in zip(own, plan.outputs, wholes, strict=True)
    )


def _output(own: Any, k: int, whole: Whole, region: Region) -> Output:
    """How this rank's `k`-th output becomes the whole one."""
    out = whole.outputs[k]
    if is_column(out) and is_column(own) and _has_own_part(own, out, region):
        return Output("rows")
    if not isinstance(out, Tensor) or not isinstance(own, Tensor):
        if type(own) is not type(out) or not _is_equal(own, out):
            raise UndividedError(f"it returns a {type(out).__name__} that depends on the rows")
        return Output("same")
    for how in _ways(own, out, region.block):
        joined = join(own.detach(), how, region)
        # A wrong mean may be near the right one: only rows are given the benefit of the doubt.
        rows = how.kind == "rows"
        if whole.same_output(k, joined) if rows else apart(joined, out) <= tolerance_of(out):
            return how
    raise UndividedError("its outputs are not those of the whole batch")


def _has_own_part(own: Any, whole: Any, region: Region) -> bool:
    """Whether all ranks' lists, one after the other, are the whole one. Collective."""
    if len(whole) != region.block.total:
        return False
    parts = region.way.all_gather_object(own)
    return type(own) is type(whole) and whole == type(whole)(chain(*parts))


def _is_equal(mine: Any, theirs: Any) -> bool:
    """Whether two values that are no tensors are the same, or one."""
    equal = mine is theirs or mine == theirs
    return equal if isinstance(equal, bool) else bool(np.all(equal))


def _ways(own: Tensor, whole: Tensor, block: Block) -> Iterator[Output]:
    """How this rank's output may become the whole one, by their shapes: the same on all ranks."""
    for dim in range(whole.dim() if own.dim() == whole.dim() else 0):
        mine, all_of_them = list(own.shape), list(whole.shape)
        rows, total = mine.pop(dim), all_of_them.pop(dim)
        if mine == all_of_them and rows * block.total == total * block.count:
            yield Output("rows", dim)
            if rows > block.count:
                yield Output("rows", dim, interleaved=True)
    if own.shape == whole.shape:
        if own.is_floating_point():
            yield Output("mean")
        yield Output("sum")


def _next_sequence_number() -> int:
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).clone().grad_fn
    number: int = node._sequence_nr()
    return number


def _foreign_leaf(outputs: Sequence[Any], start: int) -> str | None:
    """Whether these were computed from something that requires a gradient and did not come in as
    an argument or as a parameter of the module."""
    stack = [out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
    seen = set(stack)
    while stack:
        node: Any = stack.pop()
        if is_alias(node) or came_in(node):
            continue
        if hasattr(node, "variable") or node._sequence_nr() < start:
            return "its forward uses a tensor from outside that requires a gradient"
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return None
