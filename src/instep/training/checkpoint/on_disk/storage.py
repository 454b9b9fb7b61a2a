"""A state on disk: a folder for each checkpoint, which is whole or absent.

    runs/digits/step-00000100/state.json              all but tensors; checksums of files
                              model.safetensors       the model's state dict, by its own names
                              optimizer.safetensors   and one for each other entry with tensors

A large entry, which several ranks write, has files of the names that Hugging Face gives them:

                              model-00001-of-00002.safetensors
                              model-00002-of-00002.safetensors
                              model.safetensors.index.json    which file has which tensor

Nothing is unpickled. A checkpoint is written to a draft, whose name begins with a dot, and gets its
name when all of it is on the disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.training.checkpoint.errors import DamagedCheckpointError, NewerFormatError
from instep.training.checkpoint.on_disk.state_trees import decode, encode
from instep.training.checkpoint.on_disk.tensor_files import read_tensors, verify_file, write_tensors
from instep.version import __version__

FORMAT = 1
"""Counted up by a change that earlier versions cannot read."""
_INDEX = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_AT_CWD = -100
_RENAME_EXCHANGE = 2
T = TypeVar("T")
FileRecord = dict[str, Any]
"""What is written of a file, to know it again: its size in bytes, and its SHA-256."""


@dataclass(frozen=True)
class EncodedState:
    """A state as it is written: for each entry a tree for JSON, and its tensors by their names."""

    trees: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]

    @classmethod
    def encode(cls, state: dict[str, Any]) -> EncodedState:
        """The tensors are those of `state`. Raises CannotSaveError."""
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in state}
        trees = {name: encode(value, name, tensors[name]) for name, value in state.items()}
        return cls(trees, tensors)

    def copy(self, memory: EncodedState | None = None) -> EncodedState:
        """With copies of the tensors on the CPU, in the memory of those of `memory` that fit."""
        known = {} if memory is None else memory.tensors
        copies = {
            entry: {name: _copy(t, known.get(entry, {}).get(name)) for name, t in tensors.items()}
            for entry, tensors in self.tensors.items()
        }
        return EncodedState(self.trees, copies)


def write(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` to `folder/step-…`, whole or not at all; returns its path.

    An older checkpoint of this step is replaced.

    Args:
        folder: is made if it does not exist.
        step: the number by which checkpoints are ordered, at least 0.
        state: entries by their names, which become names of files: trees of tensors, arrays,
            numbers, strings, None, lists, tuples and dicts.

    Raises CannotSaveError (with the path of a value that has no place in a file), OSError.
    """
    return write_encoded(folder, step, EncodedState.encode(state))


def write_encoded(folder: Path, step: int, state: EncodedState) -> Path:
    """As `write`."""
    draft = make_draft(folder, step)
    try:
        files = {
            f"{name}.safetensors": write_file(draft / f"{name}.safetensors", tensors)
            for name, tensors in state.tensors.items()
            if tensors
        }
        return publish(draft, step, state.trees, files)
    finally:
        remove_draft(draft)  # of a failure, or the replaced checkpoint


def make_draft(folder: Path, step: int) -> Path:
    """An empty folder in which the checkpoint of a step is written. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{checkpoint_path(folder, step).name}.{os.getpid()}.draft"
    remove_draft(draft)
    draft.mkdir()
    return draft


def remove_draft(draft: Path) -> None:
    """Remove a folder that may have got its name, and what is in it."""
    shutil.rmtree(draft, ignore_errors=True)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a new file of tensors and wait until it is on the disk. Raises OSError."""
    sha256 = write_tensors(path, tensors)
    return {"bytes": path.stat().st_size, "sha256": sha256}


def write_weight_map(path: Path, files: Mapping[str, str], total_bytes: int) -> FileRecord:
    """Write in which file each tensor is, as Hugging Face does. Raises OSError."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
    text = json.dumps(content, indent=2, sort_keys=True).encode()
    _write_new(path, text)
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def publish(
    draft: Path,
    step: int,
    trees: dict[str, Any],
    files: dict[str, FileRecord],
    shards: dict[str, list[str]] | None = None,
) -> Path:
    """Give a draft its name, when all of it is on the disk; returns its path.

    Args:
        draft: of `make_draft`.
        step: the checkpoint's.
        trees: of the state.
        files: all that are in the draft.
        shards: the files of tensors of an entry that has several.

    Raises OSError.
    """
    path = checkpoint_path(draft.parent, step)
    index = {
        "format": FORMAT,
        "instep": __version__,
        "torch": torch.__version__,
        "step": step,
        "files": files,
        "shards": shards or {},
        "state": trees,
    }
    _write_new(draft / _INDEX, _index_text(json.dumps(index, allow_nan=False).encode()))
    _sync_directory(draft)
    if not _exchange(draft, path):
        os.replace(draft, path)
    _sync_directory(draft.parent)
    return path


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def _copy(tensor: Tensor, memory: Tensor | None) -> Tensor:
    if memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype:
        return memory.copy_(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU; every byte is verified.

    Raises DamagedCheckpointError, NewerFormatError, OSError.
    """
    index = _read_index(path)
    files = dict(index["files"])
    state = {}
    for name, value in index["state"].items():
        tensors: dict[str, Tensor] = {}
        for file in index["shards"].get(name, [f"{name}.safetensors"]):
            if (record := files.pop(file, None)) is not None:
                _check_size(path / file, record["bytes"])
                tensors |= read_tensors(path / file, record["sha256"])
        state[name] = decode(value, tensors)
    _verify_files(path, files)  # those without tensors
    return state


def verify(path: Path) -> None:
    """Read every byte of a checkpoint and keep nothing. Raises as `read` does."""
    _verify_files(path, _read_index(path)["files"])


def _verify_files(path: Path, files: dict[str, FileRecord]) -> None:
    for name, record in files.items():
        _check_size(path / name, record["bytes"])
        verify_file(path / name, record["sha256"])


def checksum(path: Path) -> str | None:
    """The checksum of a whole checkpoint; None where this rank does not see it."""
    try:
        return hashlib.sha256((path / _INDEX).read_bytes()).hexdigest()
    except OSError:
        return None


def latest(folder: Path) -> Path | None:
    """The undamaged checkpoint of the highest step; None if there is none.

    Warns of each damaged one that it passes over (InstepWarning). Raises NewerFormatError.
    """
    found = _latest(folder, verify)
    return None if found is None else found[0]


def read_latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """`latest`, and what it holds; every byte is read once."""
    return _latest(folder, read)


def _latest(folder: Path, use: Callable[[Path], T]) -> tuple[Path, T] | None:
    for path in list_checkpoints(folder):
        try:
            return path, use(path)
        except DamagedCheckpointError as error:
            warn_at_script_line(f"{error} It is left out. [INS704]")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too, from the highest step to the lowest."""
    found = [path for path in _entries(folder) if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that none is ever seen in part."""
    removed = path.with_name(f".{path.name}.{os.getpid()}.removed")
    os.replace(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_drafts(folder: Path) -> None:
    """Remove what writers that were killed have left. No writer may be at work in the folder."""
    for path in _entries(folder):
        if path.name.startswith(".step-") and path.suffix in (".draft", ".removed"):
            shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except FileNotFoundError:
        return


def _check_size(file: Path, expected: int) -> None:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise DamagedCheckpointError(file, "the file is missing") from None
    if size != expected:
        raise DamagedCheckpointError(file, f"it has {size} bytes of {expected}")


def _write_new(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _index_text(content: bytes) -> bytes:
    """JSON with a checksum of its own content."""
    checksum = hashlib.sha256(content).hexdigest()
    return b'{"sha256": "' + checksum.encode() + b'", "content":\n' + content + b"\n}\n"


def _read_index(path: Path) -> dict[str, Any]:
    file = path / _INDEX
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpointError(file, "the file is missing") from None
    content = b"\n".join(text.split(b"\n")[1:-2])
    if text != _index_text(content):
        raise DamagedCheckpointError(file, "its checksum is not that of the file that was written")
    index: dict[str, Any] = json.loads(content)
    if index["format"] > FORMAT:
        raise NewerFormatError(
            f"{path} has format {index['format']}, written by instep {index['instep']}; this "
            f"version reads formats up to {FORMAT}. Install that version, or begin in another "
            "folder."
        )
    return index


def _sync_directory(folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _exchange(draft: Path, path: Path) -> bool:
    """Let `draft` and an existing `path` change their names, in one step.

    False where there is no `path`. Where the file system cannot do it, the old one is moved away.
    """
    if not path.exists():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(draft), os.fsencode(path)
    if libc.renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    remove(path)
    return False
