"""What a forward changed in the object graph of its module, and where two forwards changed it
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.training.pytree import PLAIN
from instep.unedited.objects.graph_node import GraphNode, is_same
from instep.unedited.sharded_call.plan.module_state.module_properties import computes_weight
from instep.unedited.sharded_call.plan.module_state.object_graph import (
    ObjectGraph,
    describe_change,
    is_variable,
    join,
)

_ABSENT = object()


def find_difference(
    actual: ObjectGraph, expected: ObjectGraph, before: ObjectGraph, tolerance: float
) -> str | None:
    """Say what two forwards from the state `before` have left otherwise; None if all is alike."""
    return _Comparison(actual, expected, before, tolerance).find_difference()


def find_change(
    before: ObjectGraph,
    after: ObjectGraph,
    parts: Sequence[nn.Module],
    kept: Collection[tuple[nn.Module, str]] = (),
) -> str | None:
    """Say what a forward changed that cannot be set back, or not be divided; None if nothing.

    `kept`: the attributes that it may set to tensors.
    """
    own = {id(t) for part in parts for t in (*part._parameters.values(), *part._buffers.values())}
    normed = {
        join(before.nodes[id(part)].path, name)
        for part in parts
        for name in part.__dict__
        if computes_weight(part, name)
    }
    kept_paths = {join(before.nodes[id(part)].path, name) for part, name in kept}
    in_kept = set()
    for key, (_, path, version) in after.tensors.items():
        if key in own or path in normed:
            continue
        if key not in before.tensors:
            if path not in kept_paths:
                return f"its forward keeps tensors in {path}"
            in_kept.add(key)
            continue
        if before.tensors[key][2] != version:
            return f"its forward changes the tensor {path} in place"
    for path, key in _tensors_in(after) if in_kept else ():
        if key in in_kept and path not in kept_paths:  # in a list, too
            return f"its forward keeps tensors in {path}"
    for key_, node in after.nodes.items():
        old = before.nodes.get(key_)
        if old is None or _is_unchanged(old, node):
            continue
        if why := describe_change(node, after.external | before.external):
            return why
    return None


def _tensors_in(graph: ObjectGraph) -> Iterator[tuple[str, int]]:
    """The tensors in each node, after the node's path or, of modules, the attribute's."""
    for node in graph.nodes.values():
        if isinstance(node.contents, dict):
            places = [(_join(node, name), value) for name, value in node.contents.items()]
        else:
            values = node.contents if isinstance(node.contents, list | set) else ()
            places = [(node.path, value) for value in values]
        yield from ((path, id(value)) for path, value in places if isinstance(value, Tensor))


def is_random(before: ObjectGraph, after: ObjectGraph) -> bool:
    """Whether a generator of torch among it has drawn numbers."""
    return any(
        isinstance(node.value, torch.Generator)
        and key in before.nodes
        and before.nodes[key].contents != node.contents
        for key, node in after.nodes.items()
    )


def has_other_values(before: ObjectGraph, after: ObjectGraph) -> bool:
    """Whether a plain value among it is another one."""
    return any(
        isinstance(node.contents, dict)
        and key in before.nodes
        and any(
            isinstance(value, PLAIN) and before.nodes[key].contents.get(name, _ABSENT) != value
            for name, value in node.contents.items()
        )
        for key, node in after.nodes.items()
    )


def has_changed(before: ObjectGraph, after: ObjectGraph) -> bool:
    """Whether anything in it is another: what an object holds, or the version of a tensor."""
    nodes, tensors = before.nodes, before.tensors
    return any(
        key not in nodes or not _is_unchanged(nodes[key], node) for key, node in after.nodes.items()
    ) or any(
        key not in tensors or tensors[key][2] != version
        for key, (_, _, version) in after.tensors.items()
    )


def _is_unchanged(old: GraphNode, new: GraphNode) -> bool:
    a, b = old.contents, new.contents
    if old is new:
        return True
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else is_same(a, b)


class _Comparison:
    def __init__(
        self, actual: ObjectGraph, expected: ObjectGraph, before: ObjectGraph, tolerance: float
    ) -> None:
        self._actual, self._expected, self._before = actual, expected, before
        self._tolerance = tolerance
        self._done: set[tuple[int, int]] = set()

    def find_difference(self) -> str | None:
        for key in self._expected.roots:
            expected, actual = self._expected.nodes[key], self._actual.nodes.get(key)
            if actual is None:
                return "it names other variables"
            old = self._before.nodes.get(key)
            if path := self._find_in(actual, expected, old):
                what = "the" if is_variable(path) else "its attribute"
                return f"{what} {path} depends on the rows"
        return None

    def _find_in(self, actual: GraphNode, expected: GraphNode, old: GraphNode | None) -> str:
        """The path of what differs in two nodes; "" if nothing does."""
        a, e = actual.contents, expected.contents
        b = None if old is None else old.contents
        if isinstance(e, dict):
            if not isinstance(a, dict) or a.keys() != e.keys():
                odd = a.keys() ^ e.keys() if isinstance(a, dict) else ()
                return _join(expected, next(map(str, odd), ""))
            before = b if isinstance(b, dict) else {}
            for key, value in e.items():
                if a[key] is value and isinstance(value, PLAIN):
                    continue
                if self._differs(a[key], value, before.get(key, _ABSENT)):
                    return _join(expected, key)
            return ""
        if isinstance(e, list):
            if not isinstance(a, list) or len(a) != len(e):
                return expected.path
            before_ = b if isinstance(b, list) else []
            old_values = [*before_, *[_ABSENT] * len(e)]
            pairs = zip(a, e, old_values, strict=False)
            return expected.path if any(self._differs(*three) for three in pairs) else ""
        if isinstance(e, np.ndarray):
            return "" if _is_close_array(a, e, self._tolerance) else expected.path
        if isinstance(e, set) and not all(isinstance(x, PLAIN) for x in e):
            return "" if len(a) == len(e) else expected.path
        return "" if a == e else expected.path

    def _differs(self, actual: Any, expected: Any, before: Any) -> bool:
        if isinstance(expected, PLAIN) or isinstance(actual, PLAIN):
            return type(actual) is not type(expected) or not self._is_close(
                actual, expected, before
            )
        if type(actual) is not type(expected):
            return True
        if isinstance(expected, Tensor | torch.Generator) and actual is expected:
            return False
        a = self._actual.nodes.get(id(actual))
        e = self._expected.nodes.get(id(expected))
        if a is None or e is None or a is e or (id(a), id(e)) in self._done:
            return False
        self._done.add((id(a), id(e)))
        return bool(self._find_in(a, e, self._before.nodes.get(id(before))))

    def _is_close(self, actual: Any, expected: Any, before: Any) -> bool:
        """Whether two plain values are equal but for rounding.

        A sum may be large beside what one forward adds to it: it is the change that counts.
        """
        if actual == expected or (actual != actual and expected != expected):
            return True
        if not isinstance(expected, float | complex):
            return False
        if not isinstance(expected, complex) and actual.is_integer() and expected.is_integer():
            return False
        size = abs(expected)
        if isinstance(before, int | float) and math.isfinite(before):
            size = max(abs(expected - before), 0.1 * size)
        return bool(abs(actual - expected) <= self._tolerance * size)


def _join(node: GraphNode, name: Any) -> str:
    if isinstance(node.value, nn.Module | type):
        return join(node.path, name)
    return f"global variable {name}" if node.names else node.path


def _is_close_array(actual: Any, expected: Any, tolerance: float) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if expected.dtype.kind not in "fc":
        return np.array_equal(actual, expected)
    return bool(np.allclose(actual, expected, rtol=tolerance, atol=0, equal_nan=True))
