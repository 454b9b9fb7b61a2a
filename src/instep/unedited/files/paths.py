"""What a path means: which file, in which layer, and which ones every rank has for itself."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.descriptors import OpenFolders
from instep.unedited.files.layers import GONE, Layer

Path = str | bytes | os.PathLike[Any]
Method = TypeVar("Method", bound=Callable[..., Any])

_LINKS = 40


def on_real_files(method: Method) -> Method:
    """A method that sees and changes the files that are there."""

    @functools.wraps(method)
    def past_the_overlay(*args: Any, **kwargs: Any) -> Any:
        with bypass_overlay():
            return method(*args, **kwargs)

    return past_the_overlay  # type: ignore[return-value]


def spared_folders() -> list[str]:
    """Where every rank reads and writes for itself: no files, or caches that processes share."""
    home = os.path.expanduser("~")
    caches = [
        os.environ.get("XDG_CACHE_HOME", f"{home}/.cache"),
        f"{home}/.triton",
        *(os.environ[name] for name in _CACHES if os.environ.get(name)),
    ]
    compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")
    return ["/dev/", "/proc/", "/sys/", compiled, *(f"{os.path.realpath(c)}/" for c in caches)]


_CACHES = (
    *("HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"),
)


class Paths:
    """What both sides have in common: which file a path means."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        """The first one that knows a path is right."""
        self.open_folders = OpenFolders()
        self._spared = tuple(spared_folders())
        self._temporary: set[str] = set()
        self._followed: dict[str, str] = {}

    @on_real_files
    def spare(self, path: str) -> None:
        """No other rank can mean this path, or anything below it: let it be."""
        self._temporary.add(os.path.realpath(path))

    def is_spared(self, plain: str) -> bool:
        """Whether every rank has this path for itself, or it is no file."""
        if f"{plain}/".startswith(self._spared):
            return True
        while self._temporary and len(plain) > 1:
            if plain in self._temporary:
                return True
            plain = os.path.dirname(plain)
        return False

    def temporary_in(self, text: str) -> list[str]:
        """The temporary files that a text names, in its order."""
        return sorted((path for path in self._temporary if path in text), key=text.index)

    def forget_links(self) -> None:
        """A link, or a folder that may have been one, has changed."""
        self._followed.clear()

    def plain(self, path: Path) -> str:
        """Absolute, without links on the way to the last name."""
        text = os.path.abspath(os.fsdecode(path))
        for layer in self.layers:
            text = layer.virtual(text)
        return self._without_links_above(text)

    def followed(self, path: Path) -> str:
        """The same, and not a link itself."""
        return self._follow(self.plain(path), 0)

    def find(self, plain: str) -> str:
        """Where a plain path lies; GONE if it does not exist, or did not when the job began."""
        if self.is_spared(plain):
            return plain if os.path.lexists(plain) and self._is_itself(plain) else GONE
        for layer in self.layers:
            place = layer.find(plain)
            if place is not None:
                return place
        found = plain if os.path.lexists(plain) and self._is_itself(plain) else GONE
        kept = self.kept(plain)
        return found if kept is None else kept

    @on_real_files
    def kept(self, plain: str) -> str | None:
        """Where rank 0 has kept a path; None: it has not touched it, what was seen there is right.

        Rank 0 works at the same time, so this is asked again after looking.
        """
        return next((p for p in (x.find(plain) for x in self.layers[1:]) if p is not None), None)

    def _is_itself(self, plain: str) -> bool:
        """Whether no folder above has become a link since the job began."""
        above = os.path.dirname(plain)
        return not any(layer.find(above) for layer in self.layers) or (
            os.path.realpath(above) == above
        )

    def _without_links_above(self, path: str, depth: int = 0) -> str:
        folder, name = os.path.split(path)
        if not name:
            return path
        if folder not in self._followed:
            above = self._without_links_above(folder, depth)
            self._followed[folder] = self._follow(above, depth)
        return os.path.join(self._followed[folder], name)

    def _follow(self, plain: str, depth: int) -> str:
        place = self.find(plain)
        if place == GONE or not os.path.islink(place):
            return plain
        if depth > _LINKS:
            raise path_error(errno.ELOOP, plain)
        target = os.path.normpath(os.path.join(os.path.dirname(plain), os.readlink(place)))
        return self._follow(self._without_links_above(target, depth + 1), depth + 1)


def path_error(number: int, path: object) -> OSError:
    """What the operating system would raise about the path that the script gave."""
    return OSError(number, os.strerror(number), path)
