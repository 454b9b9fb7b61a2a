"""A tree of values as JSON and tensors, and back.

Numbers, strings, None, lists and dicts are JSON's own. Any other value is a JSON object with one
key that begins with `$`; a tensor is `{"$tensor": its name in the file of tensors}`.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.training.checkpoint.errors import CannotSaveError
from instep.training.checkpoint.on_disk.tensor_files import is_supported

_DICTS = (dict, OrderedDict, defaultdict)


def encode(value: Any, path: str, tensors: dict[str, Tensor], name: str = "") -> Any:
    """`value` as what `json.dumps` takes; its tensors are added to `tensors`.

    `path` names the value in errors, `name` is that of a tensor here. Raises CannotSaveError.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors, name)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, path, tensors, name)
    if kind in _DICTS and all(type(key) is str and key[:1] != "$" for key in value):
        return {k: encode(v, _join(path, k), tensors, _join(name, k)) for k, v in value.items()}
    if kind in (*_DICTS, Counter):
        pairs = [
            [
                encode(k, f"a key of {path}", {}),
                encode(v, f"{path}[{k!r}]", tensors, _join(name, k)),
            ]
            for k, v in value.items()
        ]
        return {"$counter" if kind is Counter else "$dict": pairs}
    if kind in (list, tuple, set, torch.Size):
        items = [encode(v, f"{path}[{k}]", tensors, _join(name, k)) for k, v in enumerate(value)]
        return items if kind is list else {"$set" if kind is set else "$tuple": items}
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    raise CannotSaveError.of_value(path, value)


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given. Raises KeyError for an unknown kind or tensor."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(kind, given)] = value.items()
        if kind == "$tensor":
            return tensors[given]
        if kind in ("$array", "$scalar", "$complex"):
            return _decode_tensor(kind, tensors[given])
        if kind[:1] == "$":
            return _DECODERS[kind](decode(given, tensors))
    return {key: decode(each, tensors) for key, each in value.items()}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$tuple": tuple,
    "$set": set,
    "$bytes": base64.b64decode,
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor], name: str) -> Any:
    kind = "$tensor"
    stored = value.detach()
    if stored.dtype is torch.complex128:
        kind, stored = "$complex", torch.view_as_real(stored.resolve_conj())
    if not is_supported(stored):
        raise CannotSaveError.of_value(f"{path} ({stored.dtype}, {stored.layout})", value)
    return {kind: _add(stored.resolve_conj().resolve_neg(), tensors, name)}


def _encode_array(value: Any, path: str, tensors: dict[str, Tensor], name: str) -> Any:
    array = np.array(value)  # a copy, in the order of C
    try:
        stored = torch.from_numpy(array)
    except TypeError as error:
        raise CannotSaveError.of_value(f"{path} ({array.dtype})", value) from error
    if not is_supported(stored):
        raise CannotSaveError.of_value(f"{path} ({array.dtype})", value)
    return {"$scalar" if isinstance(value, np.generic) else "$array": _add(stored, tensors, name)}


def _add(tensor: Tensor, tensors: dict[str, Tensor], name: str) -> str:
    name = name or "value"
    while name in tensors or name == "__metadata__":  # {1: …, "1": …}
        name += "'"
    tensors[name] = tensor
    return name


def _decode_tensor(kind: str, tensor: Tensor) -> Any:
    if kind == "$complex":
        return torch.view_as_complex(tensor)
    array = tensor.numpy()
    return array[()] if kind == "$scalar" else array
