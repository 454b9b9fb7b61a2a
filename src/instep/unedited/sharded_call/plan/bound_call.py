"""One call of a module by the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from instep.process.patching import Function
from instep.training.pytree import (
    Structure,
    flatten,
    flatten_arguments,
    is_column,
    is_value,
    unflatten,
)
from instep.unedited.sharded_call.plan.control_flow import begin_forward
from instep.unedited.sharded_call.plan.division import (
    count_elements,
    has_text,
    is_entries,
    is_list_of,
    max_rows,
    tensors_in,
)
from instep.unedited.sharded_call.plan.module_state.object_graph import FUNCTIONS

_MAX_FLAGS = 64
"""Of an object with options; it may have any number of attributes."""
AttributePlace = tuple[int, str]
"""Which of a call's parts, and the name of an attribute there."""
Given = int | AttributePlace
"""What a forward may return as it is: an argument, by its number, or a parameter or buffer."""


@dataclass(frozen=True)
class BoundCall:
    """A module, the arguments of a call, and nn.Module.__call__ as it was before the patch."""

    original: Function
    module: nn.Module
    parts: list[nn.Module]
    """The module and its parts, as they were before the call."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    """The arguments, flat."""
    structure: Structure
    kept: tuple[AttributePlace, ...] = ()
    """The attributes that its forward is known to set to tensors."""

    @classmethod
    def of(
        cls,
        original: Function,
        parts: list[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> BoundCall:
        """The call with these arguments of the script's of a module, the first of its `parts`."""
        return cls(original, parts[0], parts, args, kwargs, *flatten_arguments(args, kwargs))

    def given(self, leaves: Sequence[Any]) -> dict[int, Given]:
        """What a forward that gets `leaves` for arguments may return as it is, by the tensors'
        ids."""
        found: dict[int, Given] = {
            id(tensor): (k, name)
            for k, part in enumerate(self.parts)
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        }
        return found | {id(x): k for k, x in enumerate(leaves) if isinstance(x, Tensor)}

    def value_given(self, which: Given) -> Any:
        """The script's own tensor, if a forward has returned it as it is."""
        if isinstance(which, int):
            return self.leaves[which]
        part, name = self.parts[which[0]], which[1]
        return part._parameters.get(name, part._buffers.get(name))

    def keeping(self, places: tuple[AttributePlace, ...]) -> BoundCall:
        """The same call, of a forward that is known to set these attributes to tensors."""
        return self if places == self.kept else replace(self, kept=places)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [tensor for leaf in self.leaves for tensor in tensors_in(leaf)]

    @cached_property
    def rows(self) -> int:
        """See `max_rows`."""
        return max_rows(self.leaves)

    def has_short_first(self, size: int) -> bool:
        """Whether the first of its tensors, or a list of samples before it, has fewer rows than
        `size`. A state that follows, as an LSTM's, has one for each layer, which are no samples."""
        with_rows = (x for x in self.leaves if is_entries(x) or (isinstance(x, Tensor) and x.dim()))
        first = next(with_rows, None)
        return first is not None and max_rows([first]) < size

    @cached_property
    def elements(self) -> int:
        """See `count_elements`."""
        return count_elements(self.leaves)

    @property
    def functions(self) -> list[tuple[str, Any]]:
        """The functions among its arguments, with paths for messages."""
        found = [leaf for leaf in self.leaves if isinstance(leaf, (*FUNCTIONS, partial))]
        return [(f"argument {getattr(each, '__name__', 'partial')}", each) for each in found]

    @cached_property
    def has_objects(self) -> bool:
        """Whether a function or an object is among its arguments: more than data."""
        return any(
            not (isinstance(leaf, (Tensor, np.ndarray)) or is_value(leaf) or is_column(leaf))
            for leaf in self.leaves
        )

    @cached_property
    def is_on_accelerator(self) -> bool:
        """Whether any of its arguments or the module's parameters is not on the CPU."""
        return any(not x.is_cpu for x in (*self.tensors, *nn.Module.parameters(self.module)))

    def list_lengths(self) -> list[int]:
        """The different lengths of lists among its arguments that hold more than plain values."""
        found: dict[int, None] = {}
        waiting = [child for child in self.structure.children if child] if self.structure else []
        for node in waiting:
            if node.type in (list, tuple) and isinstance(node.keys, int):
                found[node.keys] = None
            waiting += [child for child in node.children if child]
        return list(found)

    def by_entries(self, count: int | None) -> BoundCall:
        """The same call, of whose arguments each list with `count` entries of one type is a leaf:
        one that may have an entry for each sample. None: no list is."""
        leaves, structure = flatten_arguments(
            self.args, self.kwargs, lambda value: is_list_of(value, count)
        )
        return replace(self, leaves=leaves, structure=structure)

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

    def read_like(self, other: BoundCall) -> BoundCall:
        """The call with its arguments read as those of `other`, which are as many and alike."""
        lengths = (None, *self.list_lengths())
        readings = (self, *map(self.by_entries, lengths))
        return next(each for each in readings if each.structure == other.structure)

    def without_graph(self) -> BoundCall:
        """The same call with arguments that were not computed: what requires a gradient still does,
        but the graph ends there."""
        alike: dict[int, Tensor] = {}

        def cut(leaf: Any) -> Any:
            if is_entries(leaf):
                entries = [flatten(entry) for entry in leaf]
                return type(leaf)(unflatten(list(map(cut, each)), how) for each, how in entries)
            if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
                return leaf
            return alike.setdefault(id(leaf), leaf.detach().requires_grad_())

        return self.with_leaves(list(map(cut, self.leaves)))

    def map_arguments(self, function: Callable[[Any], Any]) -> BoundCall:
        """The same call with `function` applied to its arguments and to their leaves."""
        return replace(
            self,
            args=tuple(map(function, self.args)),
            kwargs={name: function(value) for name, value in self.kwargs.items()},
            leaves=list(map(function, self.leaves)),
        )


def kind_of(leaf: Any, rows: int) -> Any:
    """The part of an argument that calls for a plan of its own; shapes, strings and numbers are
    compared separately."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.device, leaf.layout
    if isinstance(leaf, np.ndarray):
        return type(leaf), leaf.dtype, leaf.ndim
    if is_entries(leaf):
        return type(leaf), _kinds_of(leaf), None if len(leaf) == rows else len(leaf)
    if is_column(leaf):
        return type(leaf), has_text(leaf), None if len(leaf) == rows else len(leaf)
    if isinstance(leaf, str | int | float | complex) and not isinstance(leaf, bool):
        return type(leaf)
    if isinstance(leaf, np.bool_):
        return bool(leaf)
    if is_value(leaf):
        return leaf
    if isinstance(leaf, FUNCTIONS):
        return leaf.__module__, leaf.__qualname__
    # The flags of an object with options, such as argparse's.
    options = getattr(leaf, "__dict__", None) or {}
    flags = [(k, v) for k, v in list(options.items())[:_MAX_FLAGS] if v is None or type(v) is bool]
    return type(leaf), *flags


def _kinds_of(entries: Sequence[Any]) -> list[Any]:
    """What differs between these entries as between arguments that call for plans of their own."""
    kinds: list[Any] = []
    for entry in entries:
        leaves, structure = flatten(entry)
        kind = structure, [kind_of(x, len(x) if is_column(x) else 0) for x in leaves]
        if kind not in kinds:
            kinds.append(kind)
    return kinds


def is_text(leaf: Any, rows: int) -> bool:
    """Whether this is a string, or strings, for the whole batch: where there is one per row, it is
    data, as the rows are."""
    return has_text(leaf) and not (is_column(leaf) and len(leaf) == rows)


def is_number(leaf: Any, rows: int) -> bool:
    """Whether this is a number, or numbers, for the whole batch."""
    if is_column(leaf):
        return not has_text(leaf) and len(leaf) != rows
    return isinstance(leaf, int | float | complex | np.number) and not isinstance(leaf, bool)
