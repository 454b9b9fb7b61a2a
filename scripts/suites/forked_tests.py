"""PyTorch's multi-process tests with processes that are forked after the imports.

A test starts 2 to 4 processes, which would each import PyTorch for seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase

PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor", "mapped_backend")
DISTRIBUTED_TEST = "torch.testing._internal.distributed.distributed_test"


def install(*modules: str) -> None:
    """Fork the processes of tests from one that has imported these modules."""
    context = multiprocessing.get_context("forkserver")
    ours = ("instep.shm",) if os.environ["SUITE_BACKEND"] == "instep" else ()
    context.set_forkserver_preload([*PRELOADED, *ours, *modules])

    def start(target: Callable[..., None], name: str, args: Any, kwargs: Any) -> Any:
        given = (dict(os.environ), list(sys.path), target, args, kwargs)
        return context.Process(target=enter, name=name, args=given)

    def spawn(self: Any) -> None:
        self._start_processes(start)

    MultiProcessTestCase._spawn_processes = spawn
    MultiProcessTestCase._fork_processes = spawn
    torch.multiprocessing.Process = process_on_backend  # of MultiProcContinuousTest


def process_on_backend(target: Callable[..., None], args: Any = (), **kwargs: Any) -> Any:
    """A process that is not forked, whose groups are of the backend that SUITE_BACKEND names."""
    return multiprocessing.Process(target=enter_spawned, args=(target, args), **kwargs)


def enter_spawned(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """In the new process: map its groups, then the test."""
    import mapped_backend

    mapped_backend.install_from_environment()
    target(*args)


def enter(
    environment: Mapping[str, str],
    path: list[str],
    target: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """In the new process: what a fresh one would have from its parent, then the test."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    import mapped_backend

    mapped_backend.install_from_environment()
    if module := sys.modules.get(DISTRIBUTED_TEST):
        module.INIT_METHOD = os.environ["INIT_METHOD"]  # type: ignore[attr-defined]
        if os.environ["SUITE_BACKEND"] == "instep":  # else it looks for events named "gloo:..."
            module.PROFILING_SUPPORTED_BACKENDS = []  # type: ignore[attr-defined]
    target(*args, **kwargs)
