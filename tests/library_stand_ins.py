"""Stand-ins for libraries that may not be installed, with the functions that are patched."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

plain_open, plain_mkdir = open, os.mkdir
"""As they are before instep puts anything in: compiled code goes to the kernel past all of it."""


def plain_write(path: Any, data: str) -> None:
    with plain_open(path, "w") as file:
        file.write(data)


def plain_read(path: Any) -> str:
    with plain_open(path) as file:
        return file.read()


def plain_read_if_there(path: Any) -> str:
    try:
        return plain_read(path)
    except FileNotFoundError:
        return ""


class File:
    """As h5py's and soundfile's."""

    def __init__(self, name: Any, mode: str = "r", *more: Any, **options: Any) -> None:
        self.mode, self.more, self.options = mode, more, options
        if mode == "r":
            self.said = plain_read(name)
            return
        self.said = plain_read_if_there(name) if mode in ("r+", "a") else ""
        with plain_open(name, "w" if mode in ("r+", "a") else mode) as file:
            file.write(self.said + "x")


class SoundFile(File):
    """Calls the path `file`."""

    def __init__(self, file: Any, mode: str = "r", *more: Any, **options: Any) -> None:
        super().__init__(file, mode, *more, **options)


class Tokenizer:
    """As tokenizers has it."""

    def __init__(self, said: str) -> None:
        self.said = said

    def save(self, path: Any, pretty: bool = True) -> None:
        plain_write(path, f"{self.said}{pretty}")

    @staticmethod
    def from_file(path: Any) -> Tokenizer:
        return Tokenizer(plain_read(path))


class Environment:
    """As lmdb's."""

    def __init__(self, path: Any, map_size: int = 0, subdir: bool = True, **options: Any) -> None:
        self.path, self.map_size, self.subdir, self.options = path, map_size, subdir, options
        data, lock = (f"{path}/data.mdb", f"{path}/lock.mdb") if subdir else (path, f"{path}-lock")
        if not options.get("readonly"):
            if subdir and options.get("create", True):
                with suppress(FileExistsError):
                    plain_mkdir(path, options.get("mode", 0o755))
            self.said = plain_read_if_there(data)
            plain_write(data, self.said + "x")
            plain_write(lock, "lock")
        else:
            self.said = plain_read(data)
            if options.get("lock", True):
                plain_write(lock, "lock")


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


def heard(name: str) -> Callable[..., Any]:
    """A function that notes how it is called."""

    def function(*args: Any, **kwargs: Any) -> Any:
        CALLS.append((name, args, kwargs))
        return name

    function.__module__ = name
    return function


class Starts:
    """A class that notes how its objects are made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CALLS.append((type(self).__module__, args, kwargs))


def kind(module: str) -> type:
    return type("Starts", (Starts,), {"__module__": module, "__init__": lambda self, *a, **k: (
        CALLS.append((module, a, k)))})  # fmt: skip


class Arguments:
    """As transformers' TrainingArguments, a dataclass."""

    fsdp: object = None

    def __post_init__(self) -> None:
        CALLS.append(("transformers", (), {}))


def libraries() -> dict[str, dict[str, Any]]:
    """What the table knows of libraries that may not be installed, as far as it uses them."""
    lmdb = type("Environment", (Environment,), {})
    return {
        "safetensors": {
            "serialize_file": lambda tensors, filename, metadata=None: plain_write(
                filename, str(tensors)
            ),
            "safe_open": lambda filename, framework, device="cpu": plain_read(filename),
        },
        "h5py": {"File": type("File", (File,), {"__init__": File.__init__})},
        "soundfile": {"SoundFile": type("SoundFile", (SoundFile,), dict(vars(SoundFile)))},
        "lmdb": {"Environment": lmdb, "open": lmdb},
        "tokenizers": {"Tokenizer": type("Tokenizer", (Tokenizer,), dict(vars(Tokenizer)))},
        "cv2": {
            "imwrite": lambda filename, img, params=None: plain_write(filename, str(img)),
            "imread": lambda filename, flags=1: plain_read(filename),
        },
        "torchvision.io.image": {
            "write_file": lambda filename, data: plain_write(filename, str(data)),
            "read_file": lambda path: plain_read(path),
        },
        "pyarrow.parquet": {
            "write_table": lambda table, where, size=None: plain_write(where, str(table)),
            "read_table": lambda source, columns=None: plain_read(source),
        },
        "wandb": {"init": heard("wandb")},
        "horovod.torch": {"init": heard("horovod.torch")},
        "apex.parallel": {"DistributedDataParallel": kind("apex.parallel")},
        "deepspeed": {
            "initialize": heard("deepspeed.initialize"),
            "init_distributed": heard("deepspeed.init_distributed"),
        },
        "accelerate.state": {"PartialState": kind("accelerate.state")},
        "accelerate.utils.launch": {
            f"prepare_{name}": heard(f"accelerate.{name}")
            for name in ("simple_launcher_cmd_env", "multi_gpu_env", "deepspeed_cmd_env")
        },
        "accelerate.accelerator": {"Accelerator": kind("accelerate.accelerator")},
        "transformers.training_args": {
            "TrainingArguments": type("Arguments", (Arguments,), dict(vars(Arguments)))
        },
        "lightning.fabric.fabric": {"Fabric": kind("lightning.fabric.fabric")},
        "lightning.pytorch.trainer.trainer": {"Trainer": kind("lightning.pytorch")},
        "lightning_fabric.fabric": {"Fabric": kind("lightning_fabric")},
        "pytorch_lightning.trainer.trainer": {"Trainer": kind("pytorch_lightning")},
    }


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports find the stand-ins, which open files without Python's `open`."""
    for name, contents in libraries().items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        while above:
            if above not in sys.modules:
                monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
            monkeypatch.setattr(sys.modules[above], last, sys.modules[name], raising=False)
            name = above
            above, _, last = above.rpartition(".")
    CALLS.clear()
