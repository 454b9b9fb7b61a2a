"""A value that is another one for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class ScopedValue(Generic[T]):
    """A value of this process that `set_to` replaces while a block runs."""

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def set_to(self, value: T) -> Iterator[T]:
        """Inside, it is this one; afterwards it is again what it was before."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before
