"""In the rank: the collectives of torch's own process groups, from PyTorch's flight recorder."""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from instep.distributed.flight_record.script_line import OUTSIDE_SCRIPT
from instep.distributed.watchdog.call_stack import main_thread_root, main_thread_wait
from instep.distributed.watchdog.mismatch import LAST, Step, has_line
from instep.process.torch_private.distributed import dump_flight_record, process_groups

_OF_EQUAL_SHAPES = ("all_reduce", "allreduce_coalesced", "broadcast", "reduce", "reduce_scatter")
"""Of other collectives the ranks' tensors may differ, as those of a gather's root do."""
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def traced_steps(*, with_stacks: bool, line: str = "") -> list[Step]:
    """The last collectives of groups that are torch's own, Gloo's or NCCL's.

    Stacks take a second the first time. Without them only the line of the last collective is known:
    `line`, if this rank has failed in it.

    PyTorch records their dtypes, shapes and stacks, but neither roots nor reductions.
    """
    groups = process_groups()
    names = {str(group.group_name) for group in groups if type(group) is dist.ProcessGroup}
    if dump_flight_record is None or not names:
        return []
    entries = pickle.loads(dump_flight_record(True, with_stacks, False)).get("entries", [])
    steps = [*_steps(entries, names)][-LAST:]
    wait = main_thread_wait() if steps and not line else None
    line = line if wait is None else str(wait["line"])
    if line and steps and not has_line(steps[-1][3]):
        steps[-1][3] = f"{steps[-1][3]} at {line}"
    root = main_thread_root()
    if steps and root is not None:
        group, sequence, _, text = steps[-1]
        steps.append([f"{group}, root", sequence, root, f"{text} with root {root}"])
    return steps


def _steps(entries: Sequence[Mapping[str, Any]], names: set[str]) -> Iterator[Step]:
    of_groups = [e for e in entries if e["process_group"][0] in names and not e["is_p2p"]]
    coalesced = Counter((e["process_group"][0], e["collective_seq_id"]) for e in of_groups)
    for entry in of_groups:
        step = entry["process_group"][0], entry["collective_seq_id"]
        if coalesced[step] == 1:
            text, tag = _describe(entry)
            line = _line(entry.get("frames", ()))
            yield [f"{step[0]} of torch", step[1], tag, f"{text}{line}"]


def _describe(entry: Mapping[str, Any]) -> tuple[str, int]:
    """A collective in words, and the hash of what must be equal on all ranks."""
    op = entry["profiling_name"].rpartition(":")[2]
    if op not in _OF_EQUAL_SHAPES or len(entry["input_sizes"]) != 1:
        return op, zlib.crc32(op.encode())
    sizes, dtype = entry["input_sizes"][0], entry["input_dtypes"][0]
    numel = torch.Size(sizes).numel()
    tag = zlib.crc32(f"{op} {dtype} {numel}".encode())
    return f"{op} {_DTYPES.get(dtype, dtype)} {sizes}", tag


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The place of the innermost frame of the script; "" if there is none."""
    for frame in frames:
        if not frame["filename"].startswith(OUTSIDE_SCRIPT):
            return f" at {frame['filename']}:{frame['line']}"
    return ""
