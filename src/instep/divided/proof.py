"""The proof that a module's call may be divided: the whole forward and the divided one are made
from the same state and compared: outputs, what they leave behind, gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from instep.blocks import Block
from instep.divided import region as regions
from instep.divided import rows
from instep.divided.compiled import is_compiled, keep_buffers
from instep.divided.crossing import all_rows, came_in, summed
from instep.divided.division import Division, divisions
from instep.divided.region import Region
from instep.divided.rows import Rows
from instep.divided.snapshot import Snapshot, TorchGenerators, close
from instep.divided.sums import is_alias
from instep.divided.trial import attempt
from instep.errors import UndividedError
from instep.seams import Function
from instep.transport import Transport

GRADIENT = 1e-2
"""How far gradients may differ: what is not summed, or summed twice, is far beyond; a unit that
flips by rounding is not."""
HALF_GRADIENT = 1e-1
"""The same where half precision is computed in, whose rounding alone comes near the other."""

_ROUNDING = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""How far two forwards may be apart, by what they compute in: relative, in the norm."""


@dataclass(frozen=True)
class Output:
    """How one output of a divided call becomes the script's."""

    kind: Literal["rows", "mean", "sum", "same"]
    dim: int = 0
    """The dimension of the rows."""
    interleaved: bool = False
    """Whether one row of each sample comes after the other: (time x batch, ...)."""


@dataclass(frozen=True)
class Plan:
    """How the calls of one module are divided."""

    division: Division
    outputs: tuple[Output, ...]
    structure: TreeSpec
    drawing: bool
    """Whether it draws random numbers."""

    @property
    def has_sums(self) -> bool:
        """Whether an output is a mean or a sum over the rows."""
        return any(how.kind in ("mean", "sum") for how in self.outputs)


@dataclass(frozen=True)
class Call:
    """One call of a module by the script."""

    original: Function
    module: nn.Module
    leaves: list[Any]
    spec: TreeSpec

    def whole(self) -> Any:
        """On the whole batch, as one process would."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        return self.original(self.module, *args, **kwargs)

    def own(
        self, division: Division, way: Transport, *, drawing: bool
    ) -> tuple[Region, list[Any], TreeSpec]:
        """On this rank's rows."""
        block = division.block(self.leaves, way.rank, way.size)
        assert block is not None
        region = Region(block, division, way, drawing)
        return region, *regions.run(self.original, self.module, self.leaves, self.spec, region)


def divided(call: Call, plan: Plan, way: Transport) -> tuple[Plan, Any]:
    """Make the call as planned; returns the plan for the next one, and what the call returns to the
    script. Collective. Raises UndividedError.
    """
    name = type(call.module).__name__
    generators = TorchGenerators()
    versions = [buffer._version for buffer in call.module.buffers()]
    region, own, structure = call.own(plan.division, way, drawing=plan.drawing)
    if not plan.drawing and not generators.same(TorchGenerators()):
        if versions != [buffer._version for buffer in call.module.buffers()]:
            raise UndividedError.began_to_draw(name)
        generators.restore()
        return divided(call, replace(plan, drawing=True), way)
    if structure != plan.structure:
        raise UndividedError.other_outputs(name)
    joined = [_join(out, how, region) for out, how in zip(own, plan.outputs, strict=True)]
    regions.mark(own, region)
    return plan, tree_unflatten(joined, structure)


def _join(own: Any, how: Output, region: Region) -> Any:
    if how.kind == "rows" and how.interleaved:
        apart = own.unflatten(how.dim, (-1, region.block.count))
        whole = all_rows(apart, region.block, how.dim + 1, region.way)
        return whole.flatten(how.dim, how.dim + 1)
    if how.kind == "rows" and how.dim == 0 and _is_large(own, region):
        return Rows.of(own, region.block, region.way)
    if how.kind == "rows":
        return all_rows(own, region.block, how.dim, region.way)
    if how.kind == "same":
        return own
    return summed(own, region.block.share if how.kind == "mean" else 1, region.way)


class Whole:
    """The whole forward of a call, and what it left behind."""

    def __init__(self, call: Call) -> None:
        call.leaves[:] = [leaf.look() if isinstance(leaf, Rows) else leaf for leaf in call.leaves]
        self.before = Snapshot(call.module, call.leaves)
        self.value = call.whole()
        self.after = Snapshot(call.module, call.leaves)
        self.outputs, self.structure = tree_flatten(self.value)
        self.drawing = self.before.draws(self.after)
        """Whether it drew random numbers."""
        self.differentiated = False

    def differentiate(self, call: Call) -> None:
        """Find the gradients that it gives: now, while what autograd has saved is as it was."""
        self.differentiated = True
        self.pull = Pull.of(call, self.outputs)
        self.gradients = self.pull.through(self.outputs)


def _is_large(own: Tensor, region: Region) -> bool:
    """By the size of the whole output: all ranks decide alike, whatever their shares."""
    whole = own.numel() // region.block.count * region.block.total
    return whole * own.element_size() >= rows.LARGE


def prove(call: Call, way: Transport) -> tuple[Plan | None, Any, str]:
    """Find a plan for calls like this one.

    Returns the plan, or None where it cannot be divided; what the call returns to the script; and
    why not. Side effects are those of one forward. Collective.
    """
    if is_compiled(call.module.modules()):
        keep_buffers()
    whole = Whole(call)
    if why := _undividable(call, whole):
        return None, whole.value, why
    reasons = []
    for division in divisions(call.leaves, at_least=way.size):
        found, why = _tried(call, division, whole, way)
        if found is not None:
            return *found, ""
        reasons.append(why)
    return None, whole.value, reasons[0] if reasons else "no batch among its arguments"


def recheck(call: Call, plan: Plan, way: Transport) -> tuple[Any, str]:
    """A planned call, compared with the whole forward once more; see `prove` for the results."""
    whole = Whole(call)
    why = _undividable(call, whole)
    if not why:
        found, why = _tried(call, plan.division, whole, way)
        if found is not None:
            return found[1], ""
    return whole.value, why


def _tried(
    call: Call, division: Division, whole: Whole, way: Transport
) -> tuple[tuple[Plan, Any] | None, str]:
    """The plan and what the call returns, or why not; then all is as the whole forward left it."""
    if not whole.differentiated:
        whole.differentiate(call)
    whole.before.restore()
    found, why = attempt(lambda cautious: _try(call, division, whole, cautious), way)
    if found is None:
        whole.after.restore()
        return None, why
    plan, joined = found
    return (plan, tree_unflatten(joined, plan.structure)), ""


def _undividable(call: Call, whole: Whole) -> str:
    """What speaks against dividing it before it was tried; nothing if nothing does."""
    if not any(isinstance(out, Tensor) for out in whole.outputs):
        return "it returns no tensor"
    return whole.before.changed(whole.after) or ""


def _try(call: Call, division: Division, whole: Whole, way: Transport) -> tuple[Plan, list[Any]]:
    """Divide the call in this way. Raises UndividedError where it is not the same."""
    start = _next_sequence_number()
    region, own, structure = call.own(division, way, drawing=whole.drawing)
    if structure != whole.structure:
        raise UndividedError("its outputs have another structure for a part of the batch")
    ours = Snapshot(call.module, call.leaves)
    if why := whole.after.differs(ours, tolerance(torch.float32)):
        raise UndividedError(why)
    if why := _foreign_leaf(own, start):
        raise UndividedError(why)
    outputs = tuple(
        _output(mine, theirs, region) for mine, theirs in zip(own, whole.outputs, strict=True)
    )
    regions.mark(own, region)
    trial = [_join(out, how, region) for out, how in zip(own, outputs, strict=True)]
    if not _same_gradients(whole.gradients, whole.pull.through(trial), _rounding(trial)):
        raise UndividedError("its gradients are not those of the whole batch")
    joined = [_join(out, how, region) for out, how in zip(own, outputs, strict=True)]
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
        if dim is None or leaf.requires_grad:
            return leaf
        kept = torch.rand(leaf.shape, generator=generator) < 0.5
        return leaf.where(kept.to(leaf.device), torch.zeros_like(leaf))

    leaves = [altered(*pair) for pair in zip(call.leaves, plan.division.dims, strict=True)]
    other = replace(call, leaves=leaves)
    before.restore()
    wholes, structure = tree_flatten(other.whole())
    before.restore()
    region, own, own_structure = other.own(plan.division, way, drawing=plan.drawing)
    return structure == own_structure and all(
        not isinstance(whole, Tensor)
        or close(_join(out.detach(), how, region), whole, tolerance(whole.dtype, whole.device.type))
        for out, how, whole in zip(own, plan.outputs, wholes, strict=True)
    )


def _output(own: Any, whole: Any, region: Region) -> Output:
    """How this rank's output becomes the whole one."""
    if not isinstance(whole, Tensor) or not isinstance(own, Tensor):
        if type(own) is not type(whole) or own != whole:
            raise UndividedError(f"it returns a {type(whole).__name__} that depends on the rows")
        return Output("same")
    allowed = tolerance(whole.dtype, whole.device.type)
    for how in _ways(own, whole, region.block):
        if close(_join(own.detach(), how, region), whole, allowed):
            return how
    raise UndividedError("its outputs are not those of the whole batch")


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


def tolerance(dtype: torch.dtype, device: str = "cpu") -> float:
    """How far two forwards may be apart that differ by rounding: relative, in the norm."""
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _ROUNDING[dtype]


def _next_sequence_number() -> int:
    with torch.enable_grad():
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


@dataclass(frozen=True)
class Pull:
    """Gradients at some outputs, and what they become at the parameters and inputs."""

    which: tuple[int, ...]
    """Which of the outputs require a gradient."""
    directions: list[Tensor]
    targets: list[Tensor]

    @classmethod
    def of(cls, call: Call, outputs: Sequence[Any]) -> Pull:
        """Any gradient will do: every rank draws the same."""
        which = tuple(
            k for k, out in enumerate(outputs) if isinstance(out, Tensor) and out.requires_grad
        )
        generator = torch.Generator().manual_seed(0)
        directions = [
            torch.randn(outputs[k].shape, generator=generator).to(outputs[k]) for k in which
        ]
        parameters = [p for p in call.module.parameters() if p.requires_grad]
        inputs = [x for x in call.leaves if isinstance(x, Tensor) and x.requires_grad]
        return cls(which, directions, list({id(t): t for t in (*parameters, *inputs)}.values()))

    def through(self, outputs: Sequence[Any]) -> list[Tensor | None]:
        """The gradients that these outputs give; their graph is kept."""
        if not self.which:
            return []
        roots = [outputs[k] for k in self.which]
        found = torch.autograd.grad(
            roots, self.targets, self.directions, retain_graph=True, allow_unused=True
        )
        return [None if grad is None else grad.to_dense() for grad in found]


def _rounding(outputs: Sequence[Any]) -> float:
    """How far the gradients that these outputs give may differ."""
    allowed = [tolerance(x.dtype, x.device.type) for x in outputs if isinstance(x, Tensor)]
    return HALF_GRADIENT if max(allowed, default=0.0) > GRADIENT else GRADIENT


def _same_gradients(
    want: Sequence[Tensor | None], have: Sequence[Tensor | None], allowed: float
) -> bool:
    """Whether gradients are the same, up to rounding and the units that flip by it."""
    total = sum(float(grad.norm()) ** 2 for grad in want if grad is not None) ** 0.5
    for theirs, ours in zip(want, have, strict=True):
        if theirs is None or ours is None:
            if theirs is not ours:
                return False
            continue
        size = max(float(theirs.norm()), GRADIENT * total)
        if not float((ours - theirs).norm()) <= allowed * size:
            return False
    return True
