"""The tables in which modules keep their hooks: a dozen in each, and hardly ever a hook."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from instep.unedited.objects.graph_node import HOOK_TABLES, GraphNode, is_same


class _EmptyTables(NamedTuple):
    """The tables of a module that had no hook, and their nodes."""

    path: str
    tables: dict[str, Any]
    nodes: dict[Hashable, GraphNode]


_without_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By module."""


def hook_table_nodes(
    path: str, module: nn.Module, attributes: dict[str, Any]
) -> dict[Hashable, GraphNode]:
    """The nodes of the module's tables of hooks, among these attributes, by the tables' ids; those
    of before where there is still no hook."""
    tables = {name: attributes[name] for name in HOOK_TABLES if name in attributes}
    is_proxy = type(module) in weakref.ProxyTypes  # it has no weak references
    is_kept = not (is_proxy or any(tables.values()))
    known: _EmptyTables | None = _without_hooks.get(module) if is_kept else None
    if known is not None and known.path == path and is_same(tables, known.tables):
        return known.nodes
    nodes: dict[Hashable, GraphNode] = {}
    for name, table in tables.items():
        if isinstance(table, dict | set):
            nodes[id(table)] = node = GraphNode(f"{path}.{name}".removeprefix("."), table)
            node.note()
    if is_kept:
        _without_hooks[module] = _EmptyTables(path, tables, nodes)
    return nodes
