"""What a data set holds at a moment: numbers, texts and containers of its own and of the objects
that it leads to, and the global variables that its functions name.

So that one knows what loading samples has changed, and can take it back.
"""

from __future__ import annotations

import io
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, strided
from torch.utils.data import Subset

from instep.distributed.communication.scopes import can_pickle
from instep.training.pytree import attributes_of
from instep.unedited.objects.referents import walk
from instep.unedited.objects.script_code import is_named_only_in, is_of_script

Variable = tuple[str, dict[str, Any]]
"""The name of a global variable, and the dict that holds it."""
Keep = Callable[..., None]
"""See `DatasetState._keep`."""
_PLAIN = (bool, int, float, str)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, set, deque, *_DICTS)
"""Those of Python: a class of the script's may load samples as one iterates over it."""
_MAX_OBJECTS = 64
_MAX_ENTRIES, _MAX_FOLLOWED = 128, 16
"""Of a container: how many numbers are looked at, and how many objects; beside them, those of the
samples that are loaded."""
_MAX_COPIED = 4096
"""Entries of a container that is copied; of a larger one the length is kept."""
_MAX_BYTES = 4096
"""Of an array, or of its rows; of a tensor that is copied."""
_LOADING = ("__init__", "__post_init__", "__getitem__", "__getstate__", "__setstate__")
_ATTRIBUTE = re.compile(r"\.(\w+)")


class DatasetState:
    """What a data set holds now.

    Args:
        dataset: the script's.
        variables: the global variables that it names.
        indices: of the samples that are about to be loaded.
    """

    def __init__(self, dataset: Any, variables: Sequence[Variable], indices: Iterable[Any]) -> None:
        while type(dataset) is Subset:
            indices = [
                dataset.indices[index]
                for index in indices
                if _is_within(index, len(dataset.indices))
            ]
            dataset = dataset.dataset
        self._dataset = dataset
        self._variables = variables
        self._indices = [index for index in indices if isinstance(index, int | str)]
        self._lasting: set[tuple[str, int]] = set()
        """What cannot be brought back."""
        self._restore: list[Callable[[], None]] = []
        self._values = self._look(self._keep)

    def find_change(self, *, draws: bool) -> tuple[str, bool]:
        """Where something has changed by now, empty if nowhere; and whether `restore` can take it
        back. Not counted is a cache, a dict that is filled by index: another rank fills its own.

        draws: whether the samples draw random numbers, on which what is kept may depend.
        """
        first, is_restorable = "", True
        for (path, identity), now in self._look(lambda *_: None).items():
            before = self._values.get((path, identity))
            if before is None or before == now:
                continue
            end = ""
            if isinstance(now, _Contents):
                end = now.difference(before)
                if not end and self._is_cache(path, before, draws):
                    continue
            else:
                is_restorable &= (path, identity) not in self._lasting
            first = first or path + end
        is_attribute = first.startswith((".", "["))
        return (type(self._dataset).__name__ if is_attribute else "") + first, is_restorable

    def restore(self) -> None:
        """Bring back what containers, arrays and tensors held, and the numbers."""
        for restore in self._restore:
            restore()

    def _keep(self, make: Callable[..., Callable[[], None]], *args: Any) -> None:
        """`make(*args)` makes a function that brings something back."""
        self._restore.append(make(*args))

    def _look(self, keep: Keep) -> dict[tuple[str, int], Any]:
        """What there is by now, by the path to it and, for what has an identity, that."""
        found: dict[tuple[str, int], Any] = {}
        variables = {f"the variable {name}": space.get(name) for name, space in self._variables}
        for name, space in self._variables:
            keep(partial, space.__setitem__, name, space.get(name))
        found["", 1] = _Contents(variables, "{}", (), has_length=False)

        def follow(path: str, value: Any) -> Iterator[tuple[str, Any]]:
            if type(value) is tuple or type(value) in _CONTAINERS:
                contents = _Contents(value, "[{!r}]", self._indices)
                if type(value) is not tuple:
                    keep(_keep_container, value)
            elif not path or is_of_script(type(value)):
                own = attributes_of(value)
                keep(partial, _set_attributes, value, own)
                attributes = _of_classes(value, keep) | own
                contents = _Contents(attributes, ".{}", (), has_length=False)
            else:
                return
            found[path, 0] = contents
            yield from ((path + contents.text(key), x) for key, x in contents.objects)

        roots = [("", self._dataset), *variables.items()]
        for path, value in walk(roots, follow, _MAX_OBJECTS + len(self._indices)):
            self._look_at(path, value, found, keep)
        return found

    def _look_at(
        self, path: str, value: Any, found: dict[tuple[str, int], Any], keep: Keep
    ) -> None:
        """Add what is compared of a file, a tensor or an array to what is `found`."""
        if isinstance(value, io.TextIOWrapper | io.BufferedWriter):
            found[path, id(value)] = _position(value)
            self._lasting.add((path, id(value)))
        elif isinstance(value, Tensor) and not value.is_inference():
            found[path, id(value)] = value._version
            is_sample = path.endswith("]")  # of which there may be many
            if value.layout is strided and value.nbytes <= _MAX_BYTES and not is_sample:
                keep(_keep_tensor, value)
            else:
                self._lasting.add((path, id(value)))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            found[path, id(value)] = looked_at = _bytes(value, self._indices)
            keep(partial, _set_bytes, value, looked_at)

    def _is_cache(self, path: str, before: _Contents, draws: bool) -> bool:
        """Whether what has got longer is a dict that only `__getitem__` reads, and its new entries
        are kept by index, or are objects kept by name."""
        container, name = before.container, _ATTRIBUTE.fullmatch(path)
        if type(container) not in _DICTS or name is None:
            return False
        new = [*islice(reversed(container.items()), max(0, len(container) - before.length))]
        return bool(new) and (
            all(k in self._indices or _is_object_by_name(k, value) for k, value in new)
            and not (draws and can_pickle(new[0][1]))
            and is_named_only_in(name[1], _LOADING)
        )


class _Contents:
    """What a container or an object holds: its first numbers and objects, and those of samples."""

    def __init__(
        self, container: Any, text: str, indices: Iterable[Any], *, has_length: bool = True
    ) -> None:
        self.container = container
        self.length = len(container) if has_length else 0
        self.text = text.format
        """The text of a key in a path."""
        self.objects: list[tuple[Any, Any]] = []
        self._numbers: dict[Any, Any] = {}
        pairs: Any = container.items() if isinstance(container, dict) else enumerate(container)
        for key, entry in islice(pairs, _MAX_ENTRIES):
            self._add(key, entry, _MAX_FOLLOWED)
        for index in indices:
            if isinstance(container, dict) and index in container:
                self._add(index, dict.__getitem__(container, index), _MAX_OBJECTS)
            elif isinstance(container, list | tuple) and _is_within(index, len(container)):
                self._add(index, container[index], _MAX_OBJECTS)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Contents)
            and self.length == other.length
            and not self.difference(other)
        )

    __hash__ = None  # type: ignore[assignment]

    def difference(self, before: _Contents) -> str:
        """The end of the path to a number that has changed; empty if none has."""
        if self._numbers == before._numbers:
            return ""
        for key, number in self._numbers.items():
            old = before._numbers.get(key)
            if type(old) is type(number) and old != number:
                return self.text(key)
        return ""

    def _add(self, key: Any, entry: Any, most: int) -> None:
        if type(entry) in _PLAIN:
            self._numbers[key] = entry
        elif len(self.objects) < most and not _is_plain_tuple(entry):
            self.objects.append((key, entry))


def _is_plain_tuple(entry: Any) -> bool:
    return type(entry) is tuple and all(type(each) in _PLAIN for each in entry)


def _is_object_by_name(key: Any, value: Any) -> bool:
    return isinstance(key, str) and not isinstance(value, (tuple, *_PLAIN, *_CONTAINERS))


def _is_within(index: Any, length: int) -> bool:
    return isinstance(index, int) and -length <= index < length


def _of_classes(value: Any, keep: Keep) -> dict[str, Any]:
    """The numbers and containers that the classes of an object have."""
    found: dict[str, Any] = {}
    for base in reversed(type(value).__mro__):
        if is_of_script(base):
            kinds = (*_PLAIN, *_CONTAINERS)
            kept = {k: x for k, x in vars(base).items() if type(x) in kinds and k[:2] != "__"}
            keep(partial, _set_class_attributes, base, kept)
            found |= kept
    return found


def _keep_container(container: Any) -> Callable[[], None]:
    """A function that brings back what it holds now."""
    kept = container.copy() if len(container) <= _MAX_COPIED else None
    length = len(container)

    def restore() -> None:
        if kept is None:
            while len(container) > length and not isinstance(container, set):
                container.popitem() if isinstance(container, dict) else container.pop()
        elif isinstance(container, dict | set):
            container.clear()
            container.update(kept)
        else:
            container.clear()
            container.extend(kept)

    return restore


def _keep_tensor(tensor: Tensor) -> Callable[[], None]:
    """A function that brings back what it holds now, if it was changed."""
    kept, version = tensor.detach().clone(), tensor._version

    def restore() -> None:
        if tensor._version != version:
            tensor.detach().copy_(kept)

    return restore


def _set_attributes(value: Any, kept: dict[str, Any]) -> None:
    now = attributes_of(value)
    for name, entry in kept.items():
        if now.get(name) is not entry:
            object.__setattr__(value, name, entry)
    for name in now.keys() - kept.keys():
        object.__delattr__(value, name)


def _set_class_attributes(cls: type, kept: dict[str, Any]) -> None:
    for name, entry in kept.items():
        if vars(cls).get(name) is not entry:
            type.__setattr__(cls, name, entry)


def _bytes(array: np.ndarray[Any, Any], indices: Iterable[Any]) -> dict[int, bytes]:
    """The bytes of a small array, or of its small rows at these indices."""
    if array.nbytes <= _MAX_BYTES:
        return {0: array.tobytes()}
    if not array.ndim or array.nbytes // len(array) > _MAX_BYTES:
        return {}
    return {index: array[index].tobytes() for index in indices if _is_within(index, len(array))}


def _set_bytes(array: np.ndarray[Any, Any], kept: dict[int, bytes]) -> None:
    """Let it hold these again, which `_bytes` has found in it."""
    if not array.flags.writeable:
        return
    for index, values in kept.items():
        where = ... if array.nbytes <= _MAX_BYTES else index
        array[where] = np.frombuffer(values, array.dtype).reshape(array[where].shape)


def _position(file: io.TextIOWrapper | io.BufferedWriter) -> int | None:
    """How far it is written, if that is known."""
    try:
        return file.tell() if file.writable() and file.seekable() else None
    except (OSError, ValueError):  # it is being read, or closed
        return None
