"""One call of a module by the script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from instep.process.patching import Function
from instep.training.pytree import Structure, flatten_arguments, unflatten
from instep.unedited.sharded_call.plan.control_flow import begin_forward
from instep.unedited.sharded_call.plan.module_properties import parts_of

AttributePlace = tuple[int, str]
"""Which of a call's parts, and the name of an attribute there."""


@dataclass(frozen=True)
class BoundCall:
    """A module, the arguments of a call, and nn.Module.__call__ as it was before the patch."""

    original: Function
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    """The arguments, flat."""
    structure: Structure
    kept: tuple[AttributePlace, ...] = ()
    """The attributes that its forward is known to set to tensors."""

    @classmethod
    def of(
        cls, original: Function, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BoundCall:
        """The call with these arguments of the script's."""
        return cls(original, module, args, kwargs, *flatten_arguments(args, kwargs))

    @cached_property
    def parts(self) -> list[nn.Module]:
        """The module and its parts, as they were before the call."""
        return list(parts_of(self.module))

    @cached_property
    def is_on_accelerator(self) -> bool:
        """Whether any of its arguments or the module's parameters is not on the CPU."""
        tensors = [x for x in self.leaves if isinstance(x, Tensor)]
        return any(not x.is_cpu for x in (*tensors, *nn.Module.parameters(self.module)))

    def run_whole(self) -> Any:
        """Run it on the whole batch, with the script's own arguments, which it may change."""
        begin_forward()
        original = self.original  # so called, tracebacks are those of plain Python
        return original(self.module, *self.args, **self.kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module with these arguments."""
        begin_forward()
        return self.original(self.module, *args, **kwargs)

    def with_leaves(self, leaves: list[Any]) -> BoundCall:
        """The same call with other arguments."""
        args, kwargs = unflatten(leaves, self.structure)
        return replace(self, args=args, kwargs=kwargs, leaves=leaves)

    def map_arguments(self, function: Callable[[Any], Any]) -> BoundCall:
        """The same call with `function` applied to its arguments and to their leaves."""
        return replace(
            self,
            args=tuple(map(function, self.args)),
            kwargs={name: function(value) for name, value in self.kwargs.items()},
            leaves=list(map(function, self.leaves)),
        )
