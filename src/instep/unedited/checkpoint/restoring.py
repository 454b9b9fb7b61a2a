"""Restores the state of a checkpoint in the objects that a script has built up to its loop."""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.distributed.generator_states import set_state
from instep.distributed.identity import torch_devices
from instep.unedited.checkpoint.encoding import NEW, find_named
from instep.unedited.checkpoint.kinds import Kind, form_of, kind_of
from instep.unedited.checkpoint.script_objects import ScriptObjects, VariableScope
from instep.unedited.errors import CannotSaveScriptError, as_in_code

_LAST = (Kind.LOADER, Kind.GENERATOR)
"""Kinds that are restored after all others, in this order: loaders draw when workers start."""
RESUMES_BY_ITSELF = (
    "If the script goes on from files of its own, run it without --checkpoint, or without them."
)
"""What may be the cause where a script has built something else."""


def restore(saved: Mapping[str, Any], built: ScriptObjects) -> None:
    """Restore what `encode` has returned, in what the script has `built` up to its loop.

    Raises CannotSaveScriptError if the script has built something else than before.
    """
    _Restoring(saved["objects"], built).restore(saved["variables"], saved["deleted"])


class _Restoring:
    def __init__(self, entries: Mapping[str, Any], built: ScriptObjects) -> None:
        self._entries, self._built = entries, built
        self._made: dict[str, Any] = {}

    def restore(self, variables: Mapping[str, Any], deleted: Mapping[str, list[str]]) -> None:
        for path, entry in self._entries.items():
            self._check(path, entry)
        for path, entry in self._entries.items():
            if entry["kind"] == Kind.TENSOR and not path.startswith(NEW):
                _set_form(self._find(path), entry)  # before others are made as parts of it
        order = sorted(
            self._entries.items(),
            key=lambda item: _LAST.index(item[1]["kind"]) + 1 if item[1]["kind"] in _LAST else 0,
        )
        scopes = {scope.prefix: scope for scope in self._built.scopes}
        values = {
            prefix: {name: self._value(value) for name, value in names.items()}
            for prefix, names in variables.items()
        }
        for path, entry in order:
            self._fill(self._find(path), entry)
        for prefix in values.keys() | deleted.keys():
            if prefix not in scopes:
                raise _other(f"the function or module {prefix.rstrip(': ')}")
            _bind(scopes[prefix], values.get(prefix, {}), deleted.get(prefix, []))

    def _check(self, path: str, entry: Mapping[str, Any]) -> None:
        """Refuse before anything is changed if the script has built something else."""
        if path.startswith(NEW):
            return
        value = self._find(path)
        if kind_of(value) != entry["kind"]:
            raise _other(path)
        if entry["kind"] in (Kind.TENSOR, Kind.ARRAY):
            shape, dtype, _ = form_of(value)
            old_shape, old_dtype, _ = entry.get("built") or form_of(entry["data"])
            if shape != old_shape:
                raise _other(path, f"has the shape {shape} now, and had {old_shape}")
            if dtype != old_dtype:
                raise _other(path, f"is of {dtype} now, and was of {old_dtype}")

    # ----------------------------------------------------------------------------- objects

    def _find(self, path: str) -> Any:
        if not path.startswith(NEW):
            if path not in self._built.by_path:
                raise _other(path)
            return self._built.by_path[path]
        if path not in self._made:
            self._made[path] = self._make(self._entries[path])
        return self._made[path]

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        [(kind, given)] = value.items()
        if kind == "at":
            return self._find(given)
        if kind == "named":
            return _named(given)
        if kind == "enum":
            return _named(given[0])[given[1]]
        if kind == "file":
            return _named(given[0])(given[1])
        return complex(*given) if kind == "complex" else range(*given)

    def _make(self, entry: Mapping[str, Any]) -> Any:
        """A new object, still empty unless it can never be filled."""
        kind = Kind(entry["kind"])
        if kind is Kind.TENSOR:
            return self._make_tensor(entry)
        if kind is Kind.ARRAY:
            return np.empty_like(entry["data"])
        if entry.get("iterator"):
            return iter(())
        cls = _named(entry["class"])
        if kind is Kind.TUPLE or cls is frozenset:
            items = [self._value(item) for item in entry["items"]]
            return cls._make(items) if hasattr(cls, "_make") else cls(items)
        if cls is deque:
            return deque(maxlen=entry["maxlen"])
        if cls is defaultdict:
            return defaultdict(self._value(entry["factory"]))
        return cls() if kind in (Kind.DICT, Kind.LIST, Kind.SET) else object.__new__(cls)

    def _make_tensor(self, entry: Mapping[str, Any]) -> Any:
        if "owner" in entry:
            size, stride, offset = entry["view"]
            made = torch.as_strided(self._find(entry["owner"]).detach(), size, stride, offset)
        else:
            made = entry["data"].to(entry["device"], copy=True)
            if entry["has_graph"]:
                return _without_graph(made)
        if entry["parameter"]:
            return nn.Parameter(made, entry["requires_grad"])
        return made.requires_grad_() if entry["requires_grad"] else made

    # ----------------------------------------------------------------------------- contents

    def _fill(self, target: Any, entry: Mapping[str, Any]) -> None:
        match Kind(entry["kind"]):
            case Kind.TENSOR:
                with torch.no_grad():
                    if "data" in entry:
                        target.data.copy_(entry["data"])
                    grad = entry["grad"]
                    target.grad = None if grad is None else grad.to(target.device, copy=True)
                if entry["has_graph"] and not target.requires_grad:
                    target.copy_(_without_graph(target))
            case Kind.ARRAY:
                if target.shape != entry["data"].shape:
                    target.resize(entry["data"].shape, refcheck=False)
                target[...] = entry["data"]
            case Kind.GENERATOR:
                set_state(target, entry["state"])
            case Kind.SCALER:
                target.load_state_dict(entry["state"])
            case Kind.LOADER:
                iter(target)
            case Kind.CELL:
                for value in entry["slots"].values():
                    target.cell_contents = self._value(value)
            case Kind.CLASS:
                for key, value in entry["slots"].items():
                    if vars(target).get(key[1:]) is not (made := self._value(value)):
                        setattr(target, key[1:], made)
            case kind:
                self._fill_items(target, kind, entry)
                if "attributes" in entry:
                    self._fill_attributes(target, entry["attributes"])

    def _fill_items(self, target: Any, kind: Kind, entry: Mapping[str, Any]) -> None:
        if kind is Kind.DICT:
            items = [(self._value(key), self._value(value)) for key, value in entry["items"]]
            base = OrderedDict if isinstance(target, OrderedDict) else dict
            base.clear(target)
            for key, value in items:
                base.__setitem__(target, key, value)
        elif isinstance(target, list | deque | set):  # others were made with what is in them
            values = [self._value(value) for value in entry["items"]]
            target.clear()
            (target.update if isinstance(target, set) else target.extend)(values)

    def _fill_attributes(self, target: Any, attributes: Mapping[str, Any]) -> None:
        held = getattr(target, "__dict__", {})
        for name in held.keys() - attributes.keys():
            del held[name]
        for name, value in attributes.items():
            made = self._value(value)
            if hasattr(target, "__dict__") and not _is_slot(target, name):
                held[name] = made
            else:
                object.__setattr__(target, name, made)


def _set_form(target: Tensor, entry: Mapping[str, Any]) -> None:
    """Give a tensor the shape, the dtype, the device and `requires_grad` that it had."""
    requires_grad = entry.get("requires_grad")  # none: it was no leaf
    if requires_grad is False and target.is_leaf:
        target.requires_grad_(False)
    if "built" in entry:
        data = entry["data"]
        alike = target.data if target.shape == data.shape else data
        target.grad = None
        kind, device = entry["form"][2], target.device
        if kind != device.type and kind in ("cpu", torch_devices.accelerator_type()):
            device = torch_devices.current_device(kind)  # the loop has moved it
        target.data = torch.empty_like(alike, dtype=data.dtype, device=device)
    if requires_grad and target.is_leaf:
        target.requires_grad_()


def _without_graph(tensor: Tensor) -> Tensor:
    """A copy for a tensor that had a graph: a gradient that reaches it is an error."""
    with torch.enable_grad():
        copy: Tensor = _LostGraph.apply(tensor.detach().clone().requires_grad_())  # type: ignore[no-untyped-call]
        return copy


class _LostGraph(torch.autograd.Function):
    """Stands for what a tensor was computed from before the checkpoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise CannotSaveScriptError."""
        raise CannotSaveScriptError(
            "backward() reaches what was computed in an iteration before the checkpoint, of which "
            "only the value was saved. Call backward() in the iteration that computes the loss, "
            "or let an iteration of the outermost loop be one optimizer step."
        )


def _is_slot(target: Any, name: str) -> bool:
    return any(name in cls.__dict__.get("__slots__", ()) for cls in type(target).__mro__)


def _named(name: str) -> Any:
    found = find_named(name)
    if found is None:
        raise _other(name.replace(":", "."))
    return found


def _bind(scope: VariableScope, values: Mapping[str, Any], deleted: list[str]) -> None:
    """Bind variables of a module, or of a function that runs.

    A function's variables are not deleted: a script that deleted one binds it before it reads it.
    """
    if scope.frame is None:
        scope.names.update(values)
        for name in deleted:
            scope.names.pop(name, None)
        return
    scope.frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # since then f_locals writes through
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(scope.frame), ctypes.c_int(0))


def _other(path: str, what: str = "is another object now, or none") -> CannotSaveScriptError:
    return CannotSaveScriptError(
        f"the checkpoint does not fit this script: {as_in_code(path)} {what}. Run the script as "
        f"it was when the checkpoint was written, or name an empty folder. {RESUMES_BY_ITSELF}"
    )
