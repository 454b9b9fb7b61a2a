"""PyTorch's private names: those that instep uses stand here, and nowhere else in it.

A comment says what a name is for. Each is needed in all versions of `TRIED`, where nothing else is
said. If a newer PyTorch lacks a name, this file is the one to change; `scripts/compat` runs the
tests with other versions.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from multiprocessing import connection
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.jit._builtins
import torch.nn.modules.batchnorm
import torch.nn.utils.parametrize
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.data._utils.pin_memory
import torch.utils.data._utils.signal_handling
import torch.utils.data.dataloader

from instep.process.import_hooks import after_import

Function = Callable[..., Any]
Class = TypeVar("Class", bound=type)

TRIED = ((2, 11), (2, 14))
"""The oldest and the newest PyTorch with which instep's tests were run (docs/versions.md)."""

# ---------------------------------------------------------------------------------- tensors

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of tensor subclasses is not called."""
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape and no memory of its own."""
set_version_counter = torch._C._autograd._unsafe_set_version_counter
"""Gives tensors their versions back after their values were put back."""
flatten_dense_tensors: Function = torch._utils._flatten_dense_tensors
unflatten_dense_tensors: Function = torch._utils._unflatten_dense_tensors
"""One flat tensor of several, and back."""
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many references a storage has, by the address in its `_cdata`."""


def untyped_storage_of(storage: Any) -> torch.UntypedStorage:
    """The storage that a typed one wraps, without the warning of its public method."""
    untyped: torch.UntypedStorage = getattr(storage, "_untyped_storage", storage)
    return untyped


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """A typed storage that wraps this one, without a warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def is_fsdp_parameter(parameter: torch.Tensor) -> bool:
    """Whether FSDP keeps a part of it on each rank."""
    return hasattr(parameter, "_fsdp_flattened")


fp32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
set_fp32_precision: Function = torch._C._set_fp32_precision_setter
"""In what products of float32 are computed, by backend ("generic", "cuda", "mkldnn") and kind of
operation ("all", "matmul", "conv", "rnn"): "ieee", "tf32", "bf16" or "none". The public setter of
mkldnn sets that of all backends."""
cpu_has_tf32: Callable[[], bool] = torch.cpu._is_amx_fp16_supported
neg_view = torch._neg_view
assert_async = torch._assert_async
"""An assertion on a device, for which the host does not wait."""
hooks_of = attrgetter("_backward_hooks")
"""A tensor's hooks on its gradient."""
later_hooks_of = attrgetter("_post_accumulate_grad_hooks")
"""A parameter's hooks for when its gradient is in `.grad`."""
HOOKED_NODE = torch.autograd.Function, "_register_hook"
"""The class, and the name of its static method, that C++ calls where a node of any kind gets a hook
(`register_hook`, `register_prehook`)."""
DDP_BEFORE_FORWARD = "_pre_forward"
"""The method that DistributedDataParallel.forward calls first, which is never compiled."""
COMPILER_NOTES = "_dynamo"
"""How the names of attributes begin in which torch.compile notes something of a parameter."""
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
check_finite_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Operations on lists of tensors."""

tree_flatten = torch.utils._pytree.tree_flatten
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_map_only = torch.utils._pytree.tree_map_only
tree_unflatten = torch.utils._pytree.tree_unflatten
"""Nested values, in torch's own order of leaves."""

# ---------------------------------------------------------------------- calls and backward

current_graph_task_id = torch._C._current_graph_task_id
"""Which backward is running in this thread; -1: none."""
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""At which node that backward is; None: at none, as in a callback at its end."""
run_backward = torch.autograd.graph._engine_run_backward
"""What torch.autograd.grad runs: it imports sympy to compare shapes, which takes 0.3 s."""
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""The top of the stack of torch.func's transforms; None: none is active."""
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a transform of torch.func has wrapped this tensor."""
interpreter_stack = torch._C._functorch.get_interpreter_stack
"""The transforms that are active now; None: none is."""
VMAP = torch._C._functorch.TransformType.Vmap
"""The key of torch.vmap among these."""
unwrap_transformed = torch._C._functorch.get_unwrapped
"""What this transform has wrapped."""


def is_in_forward_ad() -> bool:
    """Whether a level of torch.autograd.forward_ad is active, as in torch.func.linearize."""
    return torch.autograd.forward_ad._current_level >= 0


TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""A mode that sees every operation."""


class OperationMode(TorchDispatchMode):
    """A TorchDispatchMode that does not import torch.compile at its first use (a second)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def has_script_buffers(value: Any) -> bool:
    """Whether this is a scripted module without its Python object, as torch.fx leaves one, and has
    buffers itself or in its parts."""
    if not isinstance(value, torch._C.ScriptModule):
        return False
    if len(torch._C.BufferDict(value).items()):  # type: ignore[attr-defined]
        return True
    return any(has_script_buffers(part) for _, part in torch._C.ModuleDict(value).items())


def dispatch_mode_stack() -> list[Any]:
    """The modes that see operations on this thread now."""
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The modes that intercept torch's functions now."""
saved_tensors_hooks: Callable[[bool], tuple[Function, Function] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks
)
"""The innermost hooks that pack and unpack what autograd saves; None: there are none."""
_RAW_SAVED = "_raw_saved_"
"""Begins the names of what a node of the autograd graph has saved, as its hooks have packed it."""
_raw_saved_names: dict[type, list[str]] = {}


def saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that a node of the autograd graph has saved, without those that hooks pack."""
    kind = type(node)
    if kind not in _raw_saved_names:
        _raw_saved_names[kind] = [name for name in dir(node) if name.startswith(_RAW_SAVED)]
    found = []
    for name in _raw_saved_names[kind]:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # the graph was freed
            continue
        for each in saved if isinstance(saved, tuple | list) else (saved,):
            if getattr(each, "unpack_hook", None) is None:
                value = getattr(each, "data", None)
                found += [value] if isinstance(value, torch.Tensor) else []
    return found


profiler_enabled = torch.autograd._profiler_enabled
"""Whether torch.profiler records."""
script_operations: dict[int, str] = torch.jit._builtins._get_builtin_table()
"""The operations that torch.jit.script calls for functions of torch, by the ids of these."""
VF = torch._VF
"""The functions by which nn.RNN and its relatives compute."""


def is_caching_weights() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is on, which keeps what parametrizations
    compute."""
    return torch.nn.utils.parametrize._cache_enabled > 0


BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""The base of all batch normalisations."""
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
"""Likewise."""
Dropout = torch.nn.modules.dropout._DropoutNd
"""The base of all modules that drop units, with the probability `p`."""

# --------------------------------------------------------------------------------- devices

known_accelerator = torch._C._accelerator_getAccelerator
"""The accelerator that this process knows, without asking its driver."""
device_constructors: Callable[[], set[Any]] = torch.utils._device._device_constructors
"""The functions to which a default device is given, as they are at the first call."""
dispatch_key_for_device = torch._C._dispatch_key_for_device
has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether a device computes an operation by itself."""

# --------------------------------------------------------------------------------- loaders

pin_memory: Function = torch.utils.data._utils.pin_memory.pin_memory
"""What a DataLoader does with a batch for pin_memory=True."""
DataLoaderIterator = torch.utils.data.dataloader._BaseDataLoaderIter
"""The base of a DataLoader's iterators."""


def end_loader_workers() -> None:
    """End the worker processes of all loaders that this process iterates over."""
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    for found in gc.get_objects():
        if isinstance(found, kind):
            found._shutdown_workers()


loader_signals = torch.utils.data._utils.signal_handling
"""Its `_error_if_any_worker_fails` is called when a child process has ended."""
_REAP_SECONDS = 1.0


def ended_loader_workers(iterator: Any) -> list[tuple[int, int]]:
    """The process ids and exit codes (-n for signal n) of workers of this iterator of a loader that
    have failed; none of one without workers."""
    workers = getattr(iterator, "_workers", ())
    closed = connection.wait([worker.sentinel for worker in workers], 0)
    for worker in workers:
        if worker.sentinel in closed:
            worker.join(_REAP_SECONDS)  # its end can be seen a moment before its exit code
    return [(worker.pid, worker.exitcode) for worker in workers if worker.exitcode]


# ----------------------------------------------------------------------- torch.distributed
# What a backend is called with and returns.

_c10d = torch._C._distributed_c10d
AllgatherOptions = _c10d.AllgatherOptions
AllreduceCoalescedOptions = _c10d.AllreduceCoalescedOptions
AllreduceOptions = _c10d.AllreduceOptions
BarrierOptions = _c10d.BarrierOptions
BroadcastOptions = _c10d.BroadcastOptions
GatherOptions = _c10d.GatherOptions
ProcessGroup = _c10d.ProcessGroup
ReduceOptions = _c10d.ReduceOptions
ReduceScatterOptions = _c10d.ReduceScatterOptions
Reducer = _c10d.Reducer
ScatterOptions = _c10d.ScatterOptions
Work = _c10d.Work

dump_flight_record: Callable[[bool, bool, bool], bytes] | None = getattr(
    _c10d, "_dump_fr_trace", None
)
"""PyTorch's record of its last collectives; None in a build without it."""


def is_newer_than_tried(version: str) -> bool:
    """Whether this version of PyTorch, as in "2.15.0+cpu", is newer than any that was tried."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) > TRIED[1]


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that a loss means by two arguments of old."""
    meant: str = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    return meant


def default_store() -> dist.Store:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def device_types(group: dist.ProcessGroup | None) -> list[str]:
    """The types of devices that a process group serves; None is the default one."""
    members = group or dist.group.WORLD
    assert members is not None
    return [device.type for device in members._device_types]


def process_groups() -> Iterable[dist.ProcessGroup]:
    """All process groups of this process."""
    groups: Iterable[dist.ProcessGroup] = dist.distributed_c10d._world.pg_map
    return groups


def has_backend(name: str) -> bool:
    """Whether a backend of this name, in capitals, was registered by someone."""
    return name in dist.Backend._plugins


def set_sequence_number(gloo: dist.ProcessGroupGloo) -> None:
    """Let a group count its collectives from 0. From 2.14 on it does by itself, and warns."""
    if torch.__version__ < "2.14":
        gloo._set_sequence_number_for_group()


def allow_repeated_backward() -> None:
    """Let torch.compile make backward functions that can be called more than once.

    They have a tag in its cache on disk. Without a tag the cache would return a function that was
    compiled to be called once, and that gives wrong gradients the second time.
    """
    from torch._functorch import config  # heavy; there by now, as something is compiled

    if config.donated_buffer:
        config.donated_buffer = False
        torch.compiler.config.cache_key_tag += "no donated buffers"


# ----------------------------------------------- functions into which torch.compile must not look
# They talk to other ranks, or keep state.


def disable_compile(function: Function) -> Function:
    """A function around `function` at which torch.compile ends a graph.

    torch.compiler.disable would import torch.compile, which takes a second, whether it is used or
    not, and what this takes of torch at the first call. Before something else has imported it,
    there is nothing to disable.
    """
    from torch._compile import _disable_dynamo

    disabled: Function = _disable_dynamo(function)
    if "torch._dynamo" not in sys.modules:
        if not _called_directly:
            after_import("torch._dynamo", _end_direct_calls)
        _called_directly.append(function)
        vars(function)[_DISABLED] = function
    return disabled


_DISABLED = "__dynamo_disable"
"""Where torch keeps for a function what it calls in its place."""
_called_directly: list[Function] = []


def _end_direct_calls(_: object) -> None:
    while _called_directly:
        vars(_called_directly.pop()).pop(_DISABLED, None)


def disallow_in_graph(function: Function) -> Function:
    """`function`, which torch.compile does not take for torch's own function of that name.

    Its table of these, by name, is drawn up anew after each init_process_group; then it held the
    patched function, and collectives ran on fake tensors.
    """
    allowed = torch.compiler.allow_in_graph(function)  # only what is allowed can be disallowed
    disallowed: Function = torch._dynamo.disallow_in_graph(allowed)
    return disallowed


def skip_frame(function: Any) -> None:
    """Let all functions with the code of `function`, and what they call, run uncompiled.

    That is what torch.compiler.disable does, without its import of torch.compile and without a
    wrapper around each call. It does not keep torch.compile from tracing a caller through it.
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


def skip_methods(owner: Class) -> Class:
    """Let the methods that this class defines run uncompiled: DDP's C++ calls them from there."""
    for method in vars(owner).values():
        if isinstance(method, FunctionType):
            skip_frame(method)
    return owner
