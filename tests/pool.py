"""A kept pool of ranks: run a function on N processes that already know each other.

A fresh start of N processes costs seconds, a call on a kept pool milliseconds. A rank that fails or
hangs costs its pool, never the next test.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

SECONDS = 50.0
forkserver = multiprocessing.get_context("forkserver")
"""Of all tests: they have one forkserver, which imports once what takes long to import. torch
imports its compiler when the first optimizer is made."""
forkserver.set_forkserver_preload(
    [
        *("torch._dynamo", "numpy", "pytest"),
        *("instep.training.replicas", "instep.verify.recording.entry"),
        *("instep.launch.worker.training_loops", "sklearn.datasets", "sklearn.model_selection"),
    ]
)
_pools: dict[tuple[int, str], Pool] = {}
_backend = "auto"
_SIMULATED = ("sim", "cuda")
GPU = "gpu"
_ON_DEVICES = (*_SIMULATED, GPU)


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


def ranks(*sizes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the test's body on every rank of a world, for each of the sizes given.

    The body's arguments must pickle; what the ranks return is returned (for the last size). What it
    changes by pytest's `monkeypatch` is restored on the ranks, too.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            for size in sizes:
                run(size, body, *args, **kwargs)

        return test

    return decorate


@contextmanager
def talking_over(backend: str) -> Iterator[None]:
    """Inside, ranks are those of pools that talk over this INSTEP_BACKEND. With "sim" or
    "cuda", each rank has a simulated accelerator of that name (simulated.py); with "gpu" they share
    this host's GPU (shared_gpu.py)."""
    global _backend
    before, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = before


def run(size: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `body` on `size` ranks; returns what each returned, in the order of ranks.

    `body` is a module-level function, or a test decorated by `ranks`. Raises RankError.
    """
    which = (size, _backend if size > 1 or _backend in _ON_DEVICES else "auto")
    if which not in _pools:
        _pools[which] = Pool(*which)
    try:
        return _pools[which].call(body, args, kwargs)
    except BaseException:
        _pools.pop(which).kill()
        raise


def run_fresh(body: Callable[..., Any], *args: Any) -> None:
    """Call `body`, a module-level function, in a process that ends afterwards: fresh but for what
    the pools' processes have imported in advance. Raises RankError."""
    process = forkserver.Process(target=body, args=args)
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    if code != 0:
        raise RankError(f"{body.__name__} ended with {code}; its traceback is in stderr")


def accelerator() -> Any:
    """The module of this rank's accelerator, simulated.py or shared_gpu.py; None on the CPU."""
    return sys.modules.get("simulated") or sys.modules.get("shared_gpu")


def device() -> str:
    """torch's name of this rank's device."""
    module = accelerator()
    return "cpu" if module is None else str(module.NAME)


class Pool:
    """`size` processes in one process group, waiting for work."""

    def __init__(self, size: int, backend: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="instep-pool-")
        store = str(Path(self.folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = forkserver.Pipe()
            process = forkserver.Process(
                target=_serve, args=(theirs, store, rank, size, backend), name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, body: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(_pickled((body.__module__, body.__qualname__, args, kwargs)))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = monotonic() + SECONDS
        rank_of = {id(pipe): rank for rank, pipe in enumerate(self.pipes)}
        while len(answers) < len(self.pipes):
            open_pipes = [p for rank, p in enumerate(self.pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=max(0.0, deadline - monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = rank_of[id(pipe)]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, "the process died")
            if any(not fine for fine, _ in answers.values()):
                deadline = min(deadline, monotonic() + 6.0)  # the others may be waiting for it
        silent = [rank for rank in range(len(self.pipes)) if rank not in answers]
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        if silent or failed:
            parts = [
                f"--- rank {rank} of {len(self.pipes)}\n{text}" for rank, text in failed.items()
            ]
            if silent:
                parts.append(f"--- no answer from ranks {silent}")
            raise RankError("\n".join(parts))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


class _Pickler(ForkingPickler):
    """Sends a tensor as its bytes; torch would share its memory, by a connection for each."""

    def reducer_override(self, thing: object) -> Any:
        if type(thing) is not torch.Tensor or not _is_bytes(thing):
            return NotImplemented
        data = ctypes.string_at(thing.data_ptr(), thing.nbytes)
        return _tensor, (data, thing.dtype, thing.shape)


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether its bytes, its type and its shape are all there is of it."""
    return (
        (tensor.device.type, tensor.layout) == ("cpu", torch.strided)
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_shared())
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _pickled(thing: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(thing)
    return buffer.getvalue()


@atexit.register
def _kill_all() -> None:
    while _pools:
        _pools.popitem()[1].kill()


def _serve(pipe: Connection, store: str, rank: int, size: int, backend: str) -> None:
    """The life of a rank: meet the others, then answer calls until the pipe closes."""
    if backend in _SIMULATED:
        os.environ["SIM_NAME"] = backend
        simulated_group = importlib.import_module("simulated_group")
        simulated_group.install(device=rank)
    elif backend == GPU:
        importlib.import_module("shared_gpu").install(rank)
    else:
        os.environ["INSTEP_BACKEND"] = backend
    from instep.distributed.rendezvous import bootstrap
    from instep.unedited.sharded_call.run.forward import joined_outputs

    joined_outputs.compares_types = lambda _: False  # a test may ask where its script would not
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
    warnings.filterwarnings("ignore", "PyTorch was compiled without cuDNN")  # for simulated CUDA
    multiprocessing.set_start_method("fork", force=True)  # as in a fresh interpreter
    torch.set_num_threads(1)
    os.environ["INSTEP_WATCH"] = "off"  # a pool is killed, and looks after its ranks itself
    if size > 1:
        bootstrap.init(f"file://{store}", rank=rank, world_size=size)
    gc.freeze()  # what is imported is not looked through after each call
    while True:
        try:
            asked = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_pickled(_answer(*pickle.loads(asked))))
        if multiprocessing.active_children():
            _end_workers()
        gc.collect()


def _end_workers() -> None:
    """End the workers of loaders that are in a cycle, as an error of a worker leaves them: the
    garbage collector would close their queues first, and then wait 5 seconds for each."""
    for iterator in gc.get_objects():
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()  # type: ignore[no-untyped-call]


def _imported(name: str) -> ModuleType:
    """The module, whose objects are not looked through after each call either."""
    if name not in sys.modules:
        importlib.import_module(name)
        gc.freeze()
    return sys.modules[name]


def _answer(module: str, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    from instep.distributed.communication import scopes
    from instep.training import forward_calls
    from instep.training.batches import registry
    from instep.training.buckets import reducer
    from instep.training.losses import averages

    torch.manual_seed(0)  # what an earlier test has drawn, and its loop has left, is forgotten
    registry.reset()
    scopes._scopes.outermost = 0
    reducer._unfinished.clear()
    averages.externally_averaged.clear()  # of models that are not collected yet
    averages._forwards.clear()
    forward_calls._ended.clear()
    try:
        body: Any = _imported(module)
        for part in name.split("."):
            body = getattr(body, part)
        while hasattr(body, "__wrapped__"):
            body = body.__wrapped__
        return True, body(*args, **kwargs)
    except BaseException:  # everything that goes wrong on a rank is the parent's to report
        return False, traceback.format_exc()
    finally:
        for given in kwargs.values():
            if hasattr(given, "undo"):  # this rank's copy of a test's MonkeyPatch
                given.undo()
