"""A value of this process: what is current or installed in it, and what has happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessValue(Generic[T]):
    """A value of this process, which functions of its module set by `value`, or for a while by
    `set_to`."""

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
