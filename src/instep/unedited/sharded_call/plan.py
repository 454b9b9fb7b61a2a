"""How a module's call is divided, and the divided call itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn

from instep.distributed.communication.transport import Transport
from instep.process.patching import Function
from instep.training.pytree import Structure, flatten_arguments, unflatten
from instep.unedited.errors import UndividedError
from instep.unedited.sharded_call import region as regions
from instep.unedited.sharded_call import sharded_output
from instep.unedited.sharded_call.division import Division
from instep.unedited.sharded_call.mappings import all_rows, summed
from instep.unedited.sharded_call.region import Region
from instep.unedited.sharded_call.sharded_output import Rows
from instep.unedited.sharded_call.snapshot import TorchGenerators


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
    structure: Structure
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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    structure: Structure

    @classmethod
    def of(
        cls, original: Function, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """With these arguments of the script's."""
        return cls(original, module, args, kwargs, *flatten_arguments(args, kwargs))

    def whole(self) -> Any:
        """On the whole batch, as one process would: with the script's own arguments, which the
        forward may change."""
        return self.original(self.module, *self.args, **self.kwargs)

    def looked_at(self) -> Call:
        """The same, after all have looked at rows that were on their ranks. Collective."""
        return replace(
            self,
            args=tuple(map(_looked_at, self.args)),
            kwargs={name: _looked_at(value) for name, value in self.kwargs.items()},
            leaves=list(map(_looked_at, self.leaves)),
        )

    def with_leaves(self, leaves: list[Any]) -> Call:
        """The same with other arguments."""
        args, kwargs = unflatten(leaves, self.structure)
        return replace(self, args=args, kwargs=kwargs, leaves=leaves)

    def own(
        self, division: Division, way: Transport, *, drawing: bool
    ) -> tuple[Region, list[Any], Structure]:
        """On this rank's rows."""
        block = division.block(self.leaves, way.rank, way.size)
        assert block is not None
        region = Region(block, division, way, drawing)
        return region, *regions.run(self.original, self.module, self.leaves, self.structure, region)


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
    return plan, unflatten(joined, structure)


def _looked_at(value: Any) -> Any:
    return value.look() if isinstance(value, Rows) else value


def join(own: Any, how: Output, region: Region) -> Any:
    """The script's output, from this rank's. Collective, unless it stays on its ranks."""
    if how.kind == "rows" and how.interleaved:
        apart = own.unflatten(how.dim, (-1, region.block.count))
        whole = all_rows(apart, region.block, how.dim + 1, region.way)
        return whole.flatten(how.dim, how.dim + 1)
    if how.kind == "rows" and not isinstance(own, Tensor):
        return type(own)(chain(*region.way.all_gather_object(own)))
    if how.kind == "rows" and how.dim == 0 and _is_large(own, region):
        return Rows.of(own, region.block, region.way)
    if how.kind == "rows":
        return all_rows(own, region.block, how.dim, region.way)
    if how.kind == "same":
        return own
    return summed(own, region.block.fraction if how.kind == "mean" else 1, region.way)


def _is_large(own: Tensor, region: Region) -> bool:
    """By the size of the whole output: all ranks decide alike, whatever their shares."""
    whole = own.numel() // region.block.count * region.block.total
    return whole * own.element_size() >= sharded_output.LARGE
