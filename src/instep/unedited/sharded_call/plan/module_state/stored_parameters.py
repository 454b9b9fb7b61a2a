"""Where a module keeps parameters beside its tables: in attributes, lists, dicts and objects.

Keras's layers read them from objects, and some modules from a list that their constructor makes, or
from modules in a list.
DARTS has plain tensors for parameters. There, too, the aliases of a sharded call must stand in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from instep.training.pytree import PLAIN, items_of
from instep.unedited.objects.graph_node import HOOK_TABLES, MODULE_TABLES
from instep.unedited.sharded_call.plan.module_state.object_graph import MAX_NODES, has_contents
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason

MOVED = WholeReason(
    "the script has replaced an object in which it keeps parameters since its calls were first "
    "divided"
)

Link = tuple[Any, Any, Any, int]
"""A namespace, dict or list, a name or index in it, what is there, and the length of a
dict or list; -1 for a namespace."""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter in a list, dict or object to which an attribute of a module leads."""

    links: tuple[Link, ...]
    """From the module's namespace to the parameter."""

    @property
    def place(self) -> tuple[Any, Any, Tensor]:
        """What it is in, its name or index there, and the parameter."""
        where, key, parameter, _ = self.links[-1]
        return where, key, parameter

    def is_current(self) -> bool:
        """Whether the same objects still lead to the same parameter, and none holds more.

        `higher` appends other parameters to a list, and its next forward reads those.
        """
        try:
            return all(
                where[key] is value and length in (-1, len(where))
                for where, key, value, length in self.links
            )
        except (KeyError, IndexError):
            return False


def plain_parameters(module: nn.Module) -> list[Tensor]:
    """The tensors in attributes of a module and its parts that the script may train: they are no
    nn.Parameter, require a gradient, and were not computed."""
    kept = (value for part in module.modules() for value in part.__dict__.values())
    return [x for x in kept if type(x) is Tensor and x.is_leaf and x.requires_grad]


def find_stored_parameters(module: nn.Module) -> tuple[StoredParameter, ...]:
    """All such places of the parameters that require a gradient; the nearest MAX_NODES objects are
    searched."""
    parameters = {
        id(p)
        for p in nn.Module.parameters(module)
        if isinstance(p, nn.Parameter) and p.requires_grad
    }
    parameters.update(map(id, plain_parameters(module)))
    found: list[StoredParameter] = []
    known = set(map(id, module.modules()))  # aliases stand in their tables
    count = len(known)
    waiting: deque[tuple[Link, ...]] = deque(
        ((part.__dict__, name, value, -1),)
        for part in module.modules()
        for name, value in part.__dict__.items()
        if name not in HOOK_TABLES and name not in MODULE_TABLES
    )
    while waiting and len(known) - count < MAX_NODES:
        links = waiting.popleft()
        value = links[-1][2]
        if isinstance(value, Tensor):
            if id(value) in parameters:
                found.append(StoredParameter(links))
        elif id(value) not in known and (_is_part(value) or has_contents(value)):
            known.add(id(value))
            waiting += [(*links, link) for link in _links(value)]
    return tuple(found)


def _is_part(value: Any) -> bool:
    """Whether it is a module that no table of modules has, as N-BEATS keeps its blocks in a list.

    A recurrent one of torch replaces its list of weights itself.
    """
    return isinstance(value, nn.Module) and not isinstance(value, nn.RNNBase)


def _links(value: Any) -> Iterator[Link]:
    """What an object holds, where something else can be put in its place."""
    where: Any = value
    items: Any = ()
    length = -1
    if isinstance(value, dict):
        items, length = dict.items(value), dict.__len__(value)
    elif isinstance(value, list | deque):
        kept = items_of(value)
        items, length = enumerate(kept), len(kept)
    elif not isinstance(value, type):
        where = getattr(value, "__dict__", {})
        items = where.items()
        if isinstance(value, nn.Module):
            items = ((name, each) for name, each in items if name not in HOOK_TABLES)
    for key, each in items:
        if not isinstance(each, PLAIN):
            yield where, key, each, length
