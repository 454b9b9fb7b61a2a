"""The kinds of objects that a script holds, and what each of them contains."""

from __future__ import annotations

import functools
import inspect
import io
import marshal
import threading
import types
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from enum import Enum, StrEnum, auto
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep.distributed.generator_states import is_generator
from instep.distributed.identity.accelerators import ACCELERATORS
from instep.process.patching import ignored_warnings
from instep.training.drift.bit_sums import is_comparable
from instep.training.pytree import PLAIN, attributes_of
from instep.unedited.objects.referents import is_bound_builtin, referents
from instep.unedited.objects.script_code import is_of_script

MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
BULK = 256
"""A list, dict or tuple of more entries is compared as a whole, if it holds nothing but data."""


class Kind(StrEnum):
    """How an object is saved. Checkpoints have the values."""

    TENSOR = auto()
    ARRAY = auto()
    """Of numpy, with plain numbers."""
    GENERATOR = auto()
    """Of random numbers."""
    SCALER = auto()
    """A GradScaler."""
    LOADER = auto()
    DICT = auto()
    LIST = auto()
    """Or a deque."""
    TUPLE = auto()
    SET = auto()
    CELL = auto()
    """A variable of a function that another function inside of it uses."""
    CLASS = auto()
    """Of the script."""
    FUNCTION = auto()
    """Of the script."""
    CALLABLE = auto()
    """A method, or functools.partial."""
    ITERATOR = auto()
    INSTANCE = auto()
    """Of any other class."""
    END = auto()
    """Looked at no further."""


_KINDS: tuple[tuple[Kind, Any], ...] = (
    (Kind.TENSOR, Tensor),
    (Kind.SCALER, torch.amp.GradScaler),
    (Kind.LOADER, DataLoader),
    (Kind.DICT, dict),
    (Kind.LIST, (list, deque)),
    (Kind.TUPLE, tuple),
    (Kind.SET, (set, frozenset)),
    (Kind.CELL, types.CellType),
    (Kind.CALLABLE, (types.MethodType, functools.partial)),
)
"""Those of which all objects of some classes are."""
_ENDS = (
    *(type(None), types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
    *(io.IOBase, threading.Thread, weakref.ref, np.dtype, np.ufunc, property, staticmethod),
)
_LIBRARIES = frozenset(
    [
        *("instep", "tqdm", "rich", "logging", "warnings", "csv", "_csv", "matplotlib"),
        *("wandb", "mlflow", "tensorboard", "tensorboardX", "comet_ml", "neptune", "aim"),
        *("clearml", "threading", "_thread", "weakref", "ctypes", "multiprocessing"),
        *("concurrent", "asyncio", "subprocess", "socket", "inspect", "ast", "importlib", "abc"),
        *("contextlib", "typing"),
        *(row.library for row in ACCELERATORS if row.library.isidentifier()),
    ]
)
"""Their objects write, display or organise, and hold nothing that a training computes with."""
_PARTS_OF_TORCH = (
    *("torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch.utils.tensorboard"),
    *("torch.accelerator", "torch.profiler", "torch.autograd", "torch._C", "torch.utils.hooks"),
    *sorted({f"torch.{row.name}" for row in ACCELERATORS}),
)
_WITHOUT_SLOTS = (Kind.TENSOR, Kind.ARRAY, Kind.GENERATOR, Kind.SCALER, Kind.ITERATOR)
_WITH_POSITION = ("builtins", "itertools", "torch.utils.data.dataloader")
"""The modules whose iterators are saved by their position, or refused."""
_OF_LOADER = ("dataset", "sampler", "batch_sampler", "generator", "collate_fn", "worker_init_fn")


def is_plain(value: Any) -> bool:
    """Whether a value is saved where it is used, since nobody can change it."""
    return type(value) in PLAIN or isinstance(
        value, np.generic | torch.dtype | torch.device | range | Enum | PurePath
    )


def kind_of(value: Any) -> Kind:
    """How an object is saved."""
    for kind, classes in _KINDS:
        if isinstance(value, classes):
            return kind
    if is_bound_builtin(value):
        return Kind.CALLABLE
    if isinstance(value, np.ndarray):
        return Kind.ARRAY if not value.dtype.hasobject else Kind.END
    if is_generator(value):
        return Kind.GENERATOR
    if isinstance(value, type):
        return Kind.CLASS if is_of_script(value) and not issubclass(value, Enum) else Kind.END
    if isinstance(value, types.FunctionType):
        return Kind.FUNCTION if is_of_script(value) else Kind.END
    if isinstance(value, _ENDS) or _is_of_known_library(type(value)):
        return Kind.END
    if isinstance(value, Iterator):
        return Kind.ITERATOR if type(value).__module__ in _WITH_POSITION else Kind.INSTANCE
    is_instance = attributes_of(value) or hasattr(value, "__dict__")
    return Kind.INSTANCE if is_instance else Kind.END


def _is_of_known_library(cls: type) -> bool:
    module = cls.__module__
    is_of_some = module.partition(".")[0] in _LIBRARIES or module.startswith(_PARTS_OF_TORCH)
    return is_of_some and not issubclass(cls, nn.Module)


# ------------------------------------------------------------------------------ what is in it


def slots_of(value: Any, kind: Kind) -> list[tuple[str, Any]]:
    """What an object of this kind contains: the end of a path to it, and the value."""
    if kind in _WITHOUT_SLOTS:
        return []
    if kind is Kind.LOADER:
        return [(f".{name}", getattr(value, name)) for name in _OF_LOADER]
    if kind is Kind.CLASS:
        return [
            (f".{name}", entry)
            for name, entry in vars(value).items()
            if not name.startswith("__") or name in ("__call__", "__init__", "__getitem__")
        ]
    return [(key or ".value", entry) for key, entry in referents(value)]


# -------------------------------------------------------------------------------- its content


def digest_of(value: Any, kind: Kind) -> Any:
    """Something that differs if the content of a leaf has changed; None: always saved."""
    if kind is Kind.TENSOR:
        if isinstance(value, nn.Parameter):
            return None
        grad = grad_of(value)
        digest = None if grad is None else _tensor_digest(grad)
        return _tensor_digest(value), digest, value.is_leaf and value.requires_grad
    if kind is Kind.ARRAY:
        return value.shape, value.dtype.str, zlib.crc32(value.tobytes())
    if kind is Kind.ITERATOR:
        return iterator_state(value)
    if kind in (Kind.LIST, Kind.DICT, Kind.TUPLE) and type(value) in (list, dict, tuple):
        return large_digest(value)
    return None


def large_digest(value: Any) -> Any:
    """A digest of a large container of data; None for any other value."""
    if len(value) <= BULK:
        return None
    try:
        return zlib.crc32(marshal.dumps(value, 2)), len(value)
    except ValueError:
        return None


def grad_of(tensor: Tensor) -> Tensor | None:
    """The gradient in a leaf; other tensors keep none."""
    return tensor.grad if tensor.is_leaf else None


def form_of(value: Tensor | np.ndarray) -> list[Any]:
    """The shape, the dtype and the type of the device, as plain values."""
    device = value.device.type if isinstance(value, Tensor) else "cpu"
    return [list(value.shape), str(value.dtype), device]


def _tensor_digest(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    shape = (tuple(tensor.shape), tensor.dtype)
    if not is_comparable(tensor):
        return (*shape, tensor._version)
    if tensor.numel() == 0:
        return shape
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return (*shape, zlib.crc32(flat.view(torch.uint8).numpy().data))


def iterator_state(value: Any) -> str:
    """How far an iterator has come, as text; with "begun" in it where that cannot be known."""
    if isinstance(value, types.GeneratorType):
        states = {inspect.GEN_CREATED: "new", inspect.GEN_CLOSED: "ended"}
        return states.get(inspect.getgeneratorstate(value), "begun")
    if type(value).__module__ not in ("builtins", "itertools"):
        return "begun"
    try:
        with ignored_warnings("Pickle, copy, and deepcopy support will be removed"):
            _, arguments, *state = value.__reduce__()
    except TypeError:
        return "begun"
    inner = [iterator_state(each) for each in arguments if isinstance(each, Iterator)]
    if "ended" in inner or arguments in (((),), ("",)):
        return "ended"
    return repr((inner, [each for each in arguments if type(each) is int], state))
