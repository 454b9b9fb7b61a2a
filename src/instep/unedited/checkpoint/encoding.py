"""What has changed of the objects that a script holds, as a tree that `storage.write` takes.

An object that was there when the loop began is named by its path, and has an entry if it has
changed. An object that the loop has made has an entry from which it can be made again.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep.distributed.generator_states import state_of
from instep.training.drift.bit_sums import is_comparable
from instep.training.pytree import attributes_of, items_of
from instep.training.random_streams import is_deterministic
from instep.unedited.checkpoint.kinds import (
    MAPPINGS,
    Kind,
    form_of,
    grad_of,
    is_plain,
    iterator_state,
)
from instep.unedited.checkpoint.script_objects import ScriptObject, ScriptObjects, VariableScope
from instep.unedited.errors import CannotSaveScriptError
from instep.unedited.objects.referents import SET_ENTRY

NEW = "new "
"""Before the path of an object that was made in the loop."""
_MADE = (Kind.DICT, Kind.LIST, Kind.TUPLE, Kind.SET, Kind.INSTANCE)
"""Kinds of objects with content that the loop may make."""


def encode(before: ScriptObjects, now: ScriptObjects) -> dict[str, Any]:
    """Encode what differs between `before` and `now`: entries by path.

    Raises CannotSaveScriptError, which names a variable.
    `now` has the scopes of that moment and nothing else yet.
    """
    return _Encoding(before, now).encode()


class _Encoding:
    def __init__(self, before: ScriptObjects, now: ScriptObjects) -> None:
        self._before, self._now = before, now
        self._owners: dict[int, ScriptObject] = {}
        for node in before.nodes.values():
            if isinstance(node.value, Tensor) and (at := _memory(node.value)):
                self._owners.setdefault(at, node)

    def encode(self) -> dict[str, Any]:
        known = {scope.prefix: scope.variables for scope in self._before.scopes}
        lasting: list[tuple[VariableScope, str, Any]] = []
        fresh: list[tuple[VariableScope, str, Any]] = []
        for scope in self._now.scopes:
            for name, value in scope.variables.items():
                is_known = name in known.get(scope.prefix, {})
                (lasting if is_known else fresh).append((scope, name, value))
        entries = self._encode_all((f"{s.prefix}{name}", value) for s, name, value in lasting)
        variables: dict[str, dict[str, Any]] = {}
        for scope, name, value in lasting:
            old = known[scope.prefix][name]
            if not _is_same(old, value):
                path = f"{scope.prefix}{name}"
                variables.setdefault(scope.prefix, {})[name] = self._value(path, value)
        for scope, name, value in fresh:
            # A name of the loop's own. The loop most often binds it again before it is read; if it
            # is not saved and is read after all, Python raises a NameError.
            path = f"{scope.prefix}{name}"
            count = len(self._now.paths)
            try:
                some = self._encode_all([(path, value)])
                variables.setdefault(scope.prefix, {})[name] = self._value(path, value)
                entries.update(some)
            except CannotSaveScriptError:
                self._now.truncate(count)
        present = {scope.prefix: scope.variables for scope in reversed(self._now.scopes)}
        deleted = {
            prefix: [name for name in names if name not in present.get(prefix, {})]
            for prefix, names in known.items()
        }
        return {
            "objects": entries,
            "variables": variables,
            "deleted": {prefix: names for prefix, names in deleted.items() if names},
        }

    def _encode_all(self, values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found = {}
        for node in self._now.add(values, self._before):
            old = self._before.nodes.get(id(node.value))
            if old is None:
                found[NEW + node.path] = self._new(node)
            elif (entry := self._changed(node, old)) is not None:
                found[old.path] = entry
        return found

    # ------------------------------------------------------------------ an object's content

    def _changed(self, node: ScriptObject, old: ScriptObject) -> dict[str, Any] | None:
        """The entry of an object that was there before; None if it is as it was."""
        if node.kind is Kind.ITERATOR:
            if node.digest != old.digest or "begun" in str(node.digest):
                raise _no_position(old.path, node.value)
            return None
        if node.kind is Kind.LOADER:
            return self._loader_entry(old.path, node.value)
        if node.kind in (Kind.TENSOR, Kind.ARRAY, Kind.GENERATOR, Kind.SCALER):
            if node.form != old.form:
                return self._leaf(node) | {"built": old.form, "form": node.form}
            if node.digest is not None and node.digest == old.digest:
                return None
            return self._leaf(node)
        if node.kind in (Kind.TUPLE, Kind.CALLABLE):
            return None
        if node.digest == old.digest and _has_same(node.slots, old.slots):
            return None
        return self._content(node)

    def _loader_entry(self, path: str, loader: DataLoader[Any]) -> dict[str, Any] | None:
        """Workers that stay alive between passes have to be started before the script's next pass.

        They would have the data set as it is now, and not as it was when they were started.
        """
        if loader._iterator is None:
            return None
        of_rows = type(loader._iterator._index_sampler).__name__ == "RowBatchSampler"
        is_random = not of_rows and not is_deterministic(loader.dataset)
        if is_random or self._has_changed(loader.dataset):
            raise CannotSaveScriptError.of_variable(
                path,
                loader,
                "has persistent workers, which keep a state of their own; "
                "pass no persistent_workers",
            )
        return {"kind": Kind.LOADER.value}

    def _has_changed(self, value: Any) -> bool:
        """Whether an object, or one that it leads to, is not as it was before."""
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            node = self._now.nodes.get(id(waiting.pop()))
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            old = self._before.nodes.get(id(node.value))
            if old is None or self._changed(node, old) is not None:
                return True
            waiting += [entry for _, entry in node.slots]
        return False

    def _leaf(self, node: ScriptObject) -> dict[str, Any]:
        value = node.value
        if node.kind is Kind.TENSOR:
            requires_grad = value.requires_grad if value.is_leaf else None
            return _tensor_entry(node) | {"data": value.detach(), "requires_grad": requires_grad}
        if node.kind is Kind.ARRAY:
            return {"kind": Kind.ARRAY.value, "data": value}
        state = value.state_dict() if node.kind is Kind.SCALER else state_of(value)
        return {"kind": node.kind.value, "state": state}

    def _content(self, node: ScriptObject) -> dict[str, Any]:
        """The entry of a container or an instance, with all of its content."""
        value, path = node.value, node.path
        entry: dict[str, Any] = {"kind": node.kind.value}
        if node.kind is Kind.DICT:
            entry["items"] = [
                [self._value(path, key), self._value(f"{path}[{key!r}]", each)]
                for key, each in dict.items(value)
            ]
        elif node.kind in (Kind.LIST, Kind.TUPLE, Kind.SET):
            entry["items"] = [
                self._value(f"{path}[{k}]", each) for k, each in enumerate(items_of(value))
            ]
        elif node.kind in (Kind.CELL, Kind.CLASS):
            entry["slots"] = {key: self._value(f"{path}{key}", each) for key, each in node.slots}
            return entry
        attributes = attributes_of(value)
        if attributes or node.kind in (Kind.INSTANCE, Kind.FUNCTION):
            entry["attributes"] = {
                name: self._value(f"{path}.{name}", each) for name, each in attributes.items()
            }
        return entry

    def _new(self, node: ScriptObject) -> dict[str, Any]:
        """The entry of an object that the loop has made."""
        value, kind = node.value, node.kind
        if kind is Kind.TENSOR:
            return self._new_tensor(node)
        if kind is Kind.ARRAY and type(value) is np.ndarray:
            return {"kind": Kind.ARRAY.value, "data": value}
        if kind in _MADE and _can_be_made(value, kind):
            entry = self._content(node) | {"class": name_of(type(value))}
            if isinstance(value, deque):
                entry["maxlen"] = value.maxlen
            if type(value).__name__ == "defaultdict":
                entry["factory"] = self._value(node.path, value.default_factory)
            return entry
        if kind is Kind.ITERATOR:
            if iterator_state(value) == "ended":
                return {
                    "kind": Kind.LIST.value,
                    "class": "builtins:list",
                    "items": [],
                    "iterator": True,
                }
            raise _no_position(node.path, value)
        raise _unknown(node.path, value)

    def _new_tensor(self, node: ScriptObject) -> dict[str, Any]:
        value = node.value
        entry = _tensor_entry(node) | {
            "device": value.device,
            "parameter": isinstance(value, nn.Parameter),
            "requires_grad": value.requires_grad and value.is_leaf,
        }
        owner = self._owners.get(_memory(value))
        if owner is not None and owner.value.dtype == value.dtype and _fills_memory(owner):
            where = [list(value.shape), list(value.stride()), value.storage_offset()]
            return entry | {"owner": owner.path, "view": where}
        return entry | {"data": value.detach()}

    # -------------------------------------------------------------------------- one value

    def _value(self, path: str, value: Any) -> Any:
        """A value where it is used: as it is, or the path of the object."""
        if isinstance(value, Enum):
            return {"enum": [name_of(type(value)), value.name]}
        if isinstance(value, PurePath):
            return {"file": [name_of(type(value)), str(value)]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, complex) and not isinstance(value, np.generic):
            return {"complex": [value.real, value.imag]}
        if is_plain(value):
            return value
        known = self._before.paths.get(id(value))
        if known is not None:
            if SET_ENTRY in known:
                raise _unknown(known, value)
            return {"at": known}
        if id(value) in self._now.nodes:
            return {"at": NEW + self._now.nodes[id(value)].path}
        if callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__module__"):
            name = name_of(value)
            if find_named(name) is value:
                return {"named": name}
        raise _unknown(path, value)


def name_of(value: Any) -> str:
    """The name by which a class or function is found again: its module and its place there."""
    return f"{value.__module__}:{value.__qualname__}"


def find_named(name: str) -> Any:
    """The class or function of this name, of a module that is imported; None if there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _has_same(slots: list[tuple[str, Any]], old: list[tuple[str, Any]]) -> bool:
    return len(slots) == len(old) and all(
        key == old_key and _is_same(value, old_value)
        for (key, value), (old_key, old_value) in zip(slots, old, strict=True)
    )


def _is_same(value: Any, old: Any) -> bool:
    if value is old:
        return True
    return is_plain(value) and type(value) is type(old) and bool(value == old)


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0: it has none."""
    return tensor.untyped_storage().data_ptr() if is_comparable(tensor) else 0


def _tensor_entry(node: ScriptObject) -> dict[str, Any]:
    """What the entry of every tensor has."""
    value = node.value
    if not is_comparable(value):
        raise _unknown(node.path, value)
    # Of what it was computed from nothing is saved.
    has_graph = value.requires_grad and not value.is_leaf
    return {"kind": Kind.TENSOR.value, "grad": grad_of(value), "has_graph": has_graph}


def _fills_memory(node: ScriptObject) -> bool:
    """Whether a tensor will lead to all of its memory once it is restored."""
    if form_of(node.value) == node.form:
        return True  # the script has built it with this memory
    return bool(node.value.nbytes == node.value.untyped_storage().nbytes())


def _can_be_made(value: Any, kind: Kind) -> bool:
    """Whether an object of this class can be made without its __init__."""
    cls = type(value)
    if find_named(name_of(cls)) is not cls:
        return False
    if kind is Kind.DICT:
        return cls in MAPPINGS
    if kind in (Kind.LIST, Kind.SET):
        return cls in (list, deque, set, frozenset)
    if kind is Kind.TUPLE:
        return cls in (tuple, torch.Size) or hasattr(cls, "_make")
    if isinstance(value, nn.Module):
        return True
    return (
        cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and not hasattr(cls, "__setstate__")
    )


def _no_position(path: str, value: Any) -> CannotSaveScriptError:
    return CannotSaveScriptError.of_variable(
        path, value, "is in the middle of its values, and how far it has come cannot be saved"
    )


def _unknown(path: str, value: Any) -> CannotSaveScriptError:
    return CannotSaveScriptError.of_variable(
        path, value, "has changed in the loop, and an object of this kind cannot be saved"
    )
