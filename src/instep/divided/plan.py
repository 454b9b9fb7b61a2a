"""How a module's call is divided, and the divided call itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from instep.communication.transport import Transport
from instep.divided import region as regions
from instep.divided import rows
from instep.divided.crossing import all_rows, summed
from instep.divided.division import Division
from instep.divided.region import Region
from instep.divided.rows import Rows
from instep.divided.snapshot import TorchGenerators
from instep.errors import UndividedError
from instep.training.seams import Function


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
    joined = [join(out, how, region) for out, how in zip(own, plan.outputs, strict=True)]
    regions.mark(own, region)
    return plan, tree_unflatten(joined, structure)


def join(own: Any, how: Output, region: Region) -> Any:
    """The script's output, from this rank's. Collective, unless it stays on its ranks."""
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


def _is_large(own: Tensor, region: Region) -> bool:
    """By the size of the whole output: all ranks decide alike, whatever their shares."""
    whole = own.numel() // region.block.count * region.block.total
    return whole * own.element_size() >= rows.LARGE
