"""A line between two processes: each says words with facts, one JSON object per line of text."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

Said = dict[str, Any]
"""One thing that was said: the word is under "word"."""
LONGEST = 1 << 20
"""Bytes of one thing that is said."""


class Line:
    """One end of it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._begun = b""
        """What was heard of a thing that has not been said to its end."""

    def fileno(self) -> int:
        """Readable when something was said, or the other end hung up."""
        return self._end.fileno()

    def say(self, word: str, **facts: object) -> None:
        """Say it; who has hung up does not hear it."""
        with suppress(OSError):
            self._end.sendall(json.dumps({"word": word, **facts}).encode() + b"\n")

    def hear(self) -> list[Said] | None:
        """Wait, and return what was said, in order; None when the other end has hung up, or says
        what nobody of ours would: then it should be hung up on.

        Raises OSError where the other end's host does not answer.
        """
        try:
            data = self._end.recv(65536)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *whole, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST:
            return None
        try:
            return [_understood(text) for text in whole]
        except (ValueError, RecursionError):
            return None

    def hang_up(self) -> None:
        """The end of it."""
        self._end.close()


def _understood(text: bytes) -> Said:
    """Raises ValueError or RecursionError for what is no line of ours."""
    said = json.loads(text)
    if not isinstance(said, dict) or not isinstance(said.get("word"), str):
        raise ValueError("no word")
    return said
