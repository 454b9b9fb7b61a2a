"""The layout of a flight record, and its reader. The watcher imports this: standard library only.

A header of 8-byte words is followed by a ring of slots, one for each collective. A slot holds words
and two texts. Its number stands at both ends, so that a reader sees when it is being written.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from instep.process import is_stdlib
from instep.process.exit_status import rank_ranges

PHASES = (
    *("", "data", "forward", "backward", "optimizer", "evaluation", "checkpoint"),
    *("single_process_scope", "exit"),
)
"""The header holds the index of the phase; the first is the script's own code."""
SLOTS = 1024
HEADER_BYTES = 4096
SLOT = struct.Struct("<9q176s128sq")
"""number, sequence, entered, left, waiting, epoch, step, phase, tag; signature; line; number."""
SLOT_WORDS = SLOT.size // 8
LEFT, WAITING = 3, 4
"""Words of a slot: times in nanoseconds of CLOCK_MONOTONIC; 0: not yet."""
SIGNATURE_BYTES, LINE_BYTES = 176, 128
COUNT, EPOCH, STEP, PHASE, PHASE_SINCE, LAST_LEFT, REPORTED = range(7)
"""Words of the header; COUNT: the number of collectives that were entered; REPORTED: see
`FlightRecord.is_reported`."""
BYTES = HEADER_BYTES + SLOTS * SLOT.size
MESSAGES = "messages-"
"""How the text of a group begins whose members send and receive, of which no two do the same."""
_SEPARATOR = "\x1f"
_EXTENT = 48
"""Characters of a shape that fit."""
_OP_BYTES = 64
_OP_BEGIN_BYTES = 36
"""Of an operation with a detail that is longer, its begin, and its end, where a line stands."""
_ATTEMPTS = 3
_PREPOSITIONS = {
    "broadcast": "from",
    "scatter": "from",
    "recv": "from",
    "single_process_scope": "of",
}
"""Between an operation and its root, where it is not "to"."""


@dataclass(frozen=True)
class Entry:
    """A collective that the rank has entered."""

    number: int
    """Counts all collectives of the rank, from 1."""
    sequence: int
    """Counts those of the group, from 1: the same on all its members if they agree."""
    op: str
    shape: tuple[int, ...] | None
    """None where the collective has no tensor, tensors of several shapes, or too long a shape."""
    dtype: str
    """As "float32"; empty where there is no tensor."""
    group: str
    """See `group_text`."""
    root: int | None
    reduction: str
    """As "SUM"; empty where nothing is reduced."""
    line: str
    """The script's, as "train.py:12" with the whole path."""
    tag: int
    """A hash of what must be equal on all members: op, reduction, dtype, root, and the number of
    elements."""
    epoch: int
    step: int
    phase: str
    entered: float
    """Times are seconds of CLOCK_MONOTONIC, as `time.monotonic()`."""
    left: float | None
    """None until the collective has ended on this rank, as far as the rank knows."""
    waiting: float | None
    """Since when the rank waits for its end; None for an asynchronous one that was only issued."""

    def describe(self) -> str:
        """The collective in one line: "broadcast float32 [4] from rank 0 at train.py:15"."""
        words = [self.op, self.reduction, self.dtype]
        if self.shape is not None:
            words.append(f"[{', '.join(map(str, self.shape))}]")
        if self.root is not None:
            words.append(f"{_PREPOSITIONS.get(self.op.split()[0], 'to')} rank {self.root}")
        return " ".join(word for word in (*words, "at", self.line) if word)

    def has_waited(self, number: int, seconds: float) -> bool:
        """Whether the rank has waited that long, and not in the collective of that number."""
        waited = 0.0 if self.waiting is None else time.monotonic() - self.waiting
        return self.number != number and waited > seconds


@dataclass(frozen=True)
class FlightRecord:
    """A rank's record at one moment."""

    entries: tuple[Entry, ...]
    """The last collectives, oldest first."""
    count: int
    """Of all collectives that the rank has entered."""
    epoch: int
    step: int
    phase: str
    last_left: float | None
    """When the rank left a collective; None before it has left one."""
    is_reported: bool
    """Whether the rank itself has raised an error because the ranks disagree."""

    def open_entries(self) -> tuple[Entry, ...]:
        """The collectives in which the rank waits now."""
        return tuple(e for e in self.entries if e.left is None and e.waiting is not None)

    def issued_entries(self) -> tuple[Entry, ...]:
        """The asynchronous collectives of which no end is known, and for which no Python waits."""
        return tuple(e for e in self.entries if e.left is None and e.waiting is None)


def group_text(name: str, ranks: Iterable[int]) -> str:
    """A group as the record names it: its name in torch, and its members as ranks of the job."""
    members = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in rank_ranges(ranks))
    return f"{name[:32]}:{members}"


def message_group(rank: int, other: int, tag: int = 0) -> str:
    """As `group_text`, for messages between two ranks of the job: their order is their own."""
    return group_text(f"{MESSAGES}{tag}", (rank, other))


def encode_signature(
    op: str,
    shape: tuple[int, ...] | None,
    dtype: str,
    group: str,
    root: int | None,
    reduction: str,
) -> bytes:
    """The first text of a slot."""
    extent = "-" if shape is None else ",".join(map(str, shape))
    extent = extent if len(extent) <= _EXTENT else "-"
    texts = (_shorten_op(op), dtype, extent, "" if root is None else str(root), reduction, group)
    encoded = _SEPARATOR.join(texts).encode(errors="backslashreplace")
    if len(encoded) > SIGNATURE_BYTES:
        short = (*texts[:-1], group.partition(":")[0] + ":?")
        encoded = _SEPARATOR.join(short).encode(errors="backslashreplace")
    return encoded[:SIGNATURE_BYTES]


def _shorten_op(op: str) -> str:
    encoded = op.encode(errors="backslashreplace")
    if len(encoded) <= _OP_BYTES:
        return op
    begin, dots = encoded[:_OP_BEGIN_BYTES], "..."
    end = encoded[len(encoded) - (_OP_BYTES - len(begin) - len(dots)) :]
    return begin.decode(errors="ignore") + dots + end.decode(errors="ignore")


def read(fd: int) -> FlightRecord:
    """The record behind a file descriptor. The rank may be writing, or be stopped."""
    return decode(os.pread(fd, BYTES, 0), lambda offset: os.pread(fd, SLOT.size, offset))


def read_wait(fd: int) -> Entry | None:
    """The last collective, if the rank waits in it: takes a thousandth of the time of `read`."""
    entry = _read_last(fd)
    waits = entry is not None and entry.left is None and entry.waiting is not None
    return entry if waits else None


def read_position(fd: int) -> tuple[float, str] | None:
    """When the rank was last in a collective, and the line; None if it was in none yet, or if a
    thread without a line of the script was, such as the one of Horovod's named collectives."""
    entry = _read_last(fd)
    if entry is None or is_stdlib(entry.line):
        return None
    return max(entry.entered, entry.left or 0.0), entry.line


def _read_last(fd: int) -> Entry | None:
    (count,) = struct.unpack("<q", os.pread(fd, 8, 8 * COUNT))
    if not count:
        return None
    return _decode_slot(b"", count, lambda offset: os.pread(fd, SLOT.size, offset))


def read_header(fd: int) -> FlightRecord:
    """The record behind a file descriptor, without its entries."""
    header = os.pread(fd, 56, 0)
    return _from_header(struct.unpack_from("<7q", header), ())


def decode(
    data: bytes | bytearray | mmap.mmap, read_slot: Callable[[int], bytes] | None = None
) -> FlightRecord:
    """The record in `data`. `read_slot` reads a slot anew, where it may have changed meanwhile."""
    header = struct.unpack_from("<7q", data)
    count = header[COUNT]
    numbers = range(max(1, count - SLOTS + 1), count + 1)
    slots = (_decode_slot(data, number, read_slot) for number in numbers)
    return _from_header(header, tuple(entry for entry in slots if entry is not None))


def _from_header(header: Sequence[int], entries: tuple[Entry, ...]) -> FlightRecord:
    return FlightRecord(
        entries,
        header[COUNT],
        header[EPOCH],
        header[STEP],
        _phase(header[PHASE]),
        header[LAST_LEFT] / 1e9 or None,
        header[REPORTED] != 0,
    )


def _decode_slot(
    data: bytes | bytearray | mmap.mmap, number: int, read_slot: Callable[[int], bytes] | None
) -> Entry | None:
    """None where the slot already holds a later collective, or the rank stopped while writing."""
    offset = HEADER_BYTES + number % SLOTS * SLOT.size
    seen = bytes(data[offset : offset + SLOT.size])
    for _ in range(_ATTEMPTS if read_slot is not None else 0):
        again = read_slot(offset) if read_slot is not None else seen
        if again == seen:
            break
        seen = again
    entry = decode_slot(seen)
    return None if entry is None or entry.number != number else entry


def decode_slot(slot: bytes) -> Entry | None:
    """The entry of one slot; None where the rank stopped while writing it."""
    if len(slot) < SLOT.size:
        return None
    first, sequence, entered, left, waiting, *where, tag, signature, line, last = SLOT.unpack(slot)
    epoch, step, phase = where
    if first != last:
        return None
    op, dtype, extent, root, reduction, group = _split(signature)
    sizes = extent.split(",") if extent else []
    return Entry(
        first,
        sequence,
        op,
        tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else None,
        dtype,
        group,
        int(root) if root else None,
        reduction,
        _text(line),
        tag,
        epoch,
        step,
        _phase(phase),
        entered / 1e9,
        left / 1e9 or None,
        waiting / 1e9 or None,
    )


def _split(signature: bytes) -> list[str]:
    texts = _text(signature).split(_SEPARATOR)
    return (texts + [""] * 6)[:6]


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def _phase(index: int) -> str:
    return PHASES[index] if 0 <= index < len(PHASES) else ""
