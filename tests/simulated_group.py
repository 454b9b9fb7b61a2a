"""The collectives of the simulated accelerator: a process group in Python over Gloo, "simccl".

A collective runs in a stream of its group, which waits for the stream in which it is issued. Its
results arrive in the tensors when somebody waits for its Work: until then they are NaN, and who
touches them is told of a Race. As with NCCL, the stream that waits does, not the host.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import Backend, PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves, tree_map

import simulated
import simulated_streams
from instep.distributed.identity import accelerators
from instep.distributed.identity.accelerators import Accelerator

NAME = "simccl"
_MODULES = ("simulated", "simulated_group", "simulated_sparse", "simulated_streams")
"""They stand for a driver and kernels, and are no part of a script."""
_numbers = itertools.count()
"""Of the groups of this process."""


class SimWork(Work):
    """A collective on its way: `wait` lets its results arrive."""

    def __init__(
        self, inner: Work, arrive: Callable[[], None], result: list[Tensor], end: torch.Event
    ) -> None:
        super().__init__()
        self._inner, self._arrive, self._result, self._end = inner, arrive, result, end
        self._has_arrived = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._has_arrived:
            self._inner.wait() if timeout is None else self._inner.wait(timeout)
            self._has_arrived = True
            self._arrive()
        torch.accelerator.current_stream().wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _over_gloo(method: str, reads: Sequence[int], writes: Sequence[int]) -> Callable[..., Work]:
    """The method of that name; `reads` and `writes` are the places of its tensors."""

    def call(self: SimProcessGroup, *args: Any, **kwargs: Any) -> Work:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        inner = getattr(self.gloo_group, method)
        if not any(map(simulated.is_sim, tensors)):
            work: Work = inner(*args, **kwargs)
            return work
        if not all(map(simulated.is_sim, tensors)):
            raise RuntimeError(f"{NAME}: tensors of the CPU and of the device in one {method}")
        simulated.run_queued()
        staged = list(args)
        for place in {*reads, *writes}:
            staged[place] = tree_map(_stage, args[place])
        outputs = [leaf for place in writes for leaf in tree_leaves(args[place])]
        results = [leaf for place in writes for leaf in tree_leaves(staged[place])]
        started = inner(*staged, **kwargs)
        inputs = [leaf for place in reads for leaf in tree_leaves(args[place])]
        self.stream.wait_stream(torch.accelerator.current_stream())
        simulated.streams.touch(method, inputs, outputs, self.stream.stream_id)
        for output in outputs:
            simulated.poison(output)

        def arrive() -> None:
            for output, result in zip(outputs, results, strict=True):
                simulated.on_cpu(output).copy_(result)

        return SimWork(started, arrive, outputs, self.stream.record_event())

    call.__name__ = method
    return call


def _stage(value: Any) -> Any:
    """A copy on the CPU."""
    return simulated.on_cpu(value).clone() if simulated.is_sim(value) else value


class SimProcessGroup(ProcessGroup):
    """The group of `init_process_group("cpu:gloo,sim:simccl")`: Gloo itself for the CPU."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        gloo = ProcessGroupGloo(PrefixStore("gloo/", options.store), rank, size, options.timeout)
        gloo.options.global_ranks_in_group = options.global_ranks_in_group
        gloo.options.group_name = GroupName(options.group_id)
        if torch.__version__ < "2.14":
            gloo._set_sequence_number_for_group()
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.stream = simulated_streams.stream_of_group(simulated.KEY, next(_numbers))
        self.gloo_group = ProcessGroup(options.store, rank, size)
        for group in (self, self.gloo_group):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device(simulated.NAME), ProcessGroup.BackendType.GLOO, gloo)
        self._set_group_name(GroupName(options.group_id))

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    allreduce = _over_gloo("allreduce", [], [0])
    allreduce_coalesced = _over_gloo("allreduce_coalesced", [], [0])
    reduce = _over_gloo("reduce", [], [0])
    broadcast = _over_gloo("broadcast", [], [0])
    allgather = _over_gloo("allgather", [1], [0])
    all_gather_single = _over_gloo("_allgather_base", [1], [0])
    all_gather_single_coalesced = _over_gloo("allgather_into_tensor_coalesced", [1], [0])
    reduce_scatter = _over_gloo("reduce_scatter", [1], [0])
    reduce_scatter_single = _over_gloo("_reduce_scatter_base", [1], [0])
    reduce_scatter_single_coalesced = _over_gloo("reduce_scatter_tensor_coalesced", [1], [0])
    all_to_all_single = _over_gloo("alltoall_base", [1], [0])
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    barrier = _over_gloo("barrier", [], [])
    gather = _over_gloo("gather", [1], [0])
    scatter = _over_gloo("scatter", [1], [0])
    alltoall = _over_gloo("alltoall", [1], [0])
    send = _over_gloo("send", [0], [])
    recv = _over_gloo("recv", [], [0])
    recv_anysource = _over_gloo("recv_anysource", [], [0])


def install(device: int) -> None:
    """Bring the accelerator and its collectives to this process. Of 8 devices it sees this one, as
    a rank of an unedited script; or all, as ranks usually do, where they are called cuda."""
    os.environ["SIM_DEVICES"] = "8"
    if simulated.NAME != "cuda":
        os.environ[simulated.VARIABLE] = str(device)
    accelerators.register(
        Accelerator(simulated.NAME, "SIM", NAME, (simulated.VARIABLE,), library="simulated")
    )
    autoload()
    from torch._dynamo import trace_rules

    from instep.unedited.sharded_call.plan import control_flow

    for name in _MODULES:
        trace_rules.add(name)
    is_of_script = control_flow._is_of_script
    control_flow._is_of_script = lambda code: (
        Path(code.co_filename).stem not in _MODULES and is_of_script(code)
    )


def autoload() -> None:
    """Bring them to torch, which calls this as the entry point of a package."""
    simulated.install()
    Backend.register_backend(
        NAME,
        lambda options, _=None: SimProcessGroup(options),
        extended_api=True,
        devices=[simulated.NAME],
    )
    Backend.default_device_backend_map[simulated.NAME] = NAME
