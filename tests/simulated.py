"""A simulated accelerator, "sim", written in Python over PyTorch's hook for such backends.

Its memory is the host's, behind tensors of device sim:0 whose addresses are real, so views,
storages and saved tensors are as on any device. Every operation is computed by the CPU's kernel on
the same memory. What a real device would make wrong is made wrong here:

- New memory, and the result of a collective that nobody has waited for, are full of NaN.
- A copy to pinned memory has not happened before `torch.sim.synchronize()`, a copy from it not
  before the next operation.
- Tensors of the CPU and of the device do not mix, generators neither.
- What one stream does with memory that another uses, and has not waited for, is a Race
  (simulated_streams.py).
- What the host reads back, and copies for which it would wait, are noted with their lines.

There are as many devices as SIM_DEVICES says, and SIM_VISIBLE_DEVICES chooses among them. A process
may see several, and is expected to use one: streams and pinned memory do not tell them apart. There
are no graphs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import simulated_streams
from simulated_streams import Race as Race  # what tests expect
from simulated_streams import Streams

NAME = os.environ.get("SIM_NAME", "sim")
"""What torch calls the device: "sim", or "cuda", for which a build for CPUs has no kernels. Then
torch and instep do what they do for CUDA alone: its rules of autocast, `is_cuda`, and so on."""
KEY = "CUDA" if NAME == "cuda" else "PrivateUse1"
"""Its dispatch key."""
VARIABLE = f"{NAME.upper()}_VISIBLE_DEVICES"
_TORCH = str(Path(torch.__file__).parent)
_aten = torch.ops.aten
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


# --------------------------------------------------------------------------- what the host does


@dataclass
class Host:
    """What the host has waited for: one line of a file and an operation for each time."""

    reads: list[str] = field(default_factory=list)
    """Values that were read back."""
    uploads: list[str] = field(default_factory=list)
    """Copies to the device for which the host waits, since their source is not pinned."""

    def clear(self) -> None:
        self.reads.clear()
        self.uploads.clear()


host = Host()


@contextmanager
def counted() -> Iterator[Host]:
    """What the host waits for inside: reads and uploads, from then on."""
    host.clear()
    yield host


def _line(operation: str) -> str:
    """The innermost frame that is neither torch's nor this file's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, __file__, simulated_streams.__file__, "<")):
            return f"{name}:{frame.f_lineno}: {operation}"
        frame = frame.f_back
    return f"autograd: {operation}"


# -------------------------------------------------------------------------------------- memory


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Block(ctypes.Structure):
    """What malloc returns: a DLManagedTensor, its shape and stride, then the data."""

    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 1),
        ("stride", ctypes.c_int64 * 1),
    )


_DLPACK = 2 if NAME == "cuda" else 12
"""DLPack's number for this type of device: kDLCUDA or kDLExtDev."""
_CODES = {
    torch.bool: 6, torch.uint8: 1, torch.uint16: 1, torch.uint32: 1, torch.uint64: 1,
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0, torch.bfloat16: 4,
    torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.complex64: 5, torch.complex128: 5,
}  # fmt: skip
_HEAD = (ctypes.sizeof(_Block) + 63) // 64 * 64
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
"""libc's own free, given the block, ends the memory's life without Python."""
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _allocate(count: int, dtype: torch.dtype, index: int | None = None) -> Tensor:
    """A flat tensor on a device, the current one by default, full of NaN (or -1, or true)."""
    index = streams.device if index is None else index
    if not 0 <= index < len(_visible()):
        raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
    _state.is_used = True
    _state.devices.add(index)
    size = max(count, 1) * dtype.itemsize
    address = _libc.malloc(_HEAD + size)
    block = _Block.from_address(address)
    block.shape[0], block.stride[0], block.deleter = count, 1, _FREE
    at = address + _Block.shape.offset, address + _Block.stride.offset
    block.tensor = _DLTensor(
        address + _HEAD,
        _DLDevice(_DLPACK, index),
        1,
        _DLType(_CODES[dtype], dtype.itemsize * 8, 1),
        *(ctypes.cast(place, ctypes.POINTER(ctypes.c_int64)) for place in at),
        0,
    )
    streams.forget(address + _HEAD)
    ctypes.memset(address + _HEAD, 1 if dtype is torch.bool else 0xFF, size)
    return torch._C._from_dlpack(_new_capsule(address, b"dltensor", None))


def on_cpu(tensor: Tensor) -> Tensor:
    """A tensor of the CPU in the same memory."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    found = torch.empty(0, dtype=tensor.dtype, device="cpu")
    found.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        found = torch._conj(found)
    return torch._neg_view(found) if tensor.is_neg() else found


def poison(tensor: Tensor) -> None:
    """Make what a tensor holds NaN, or the largest number: nothing that can be relied on."""
    same = on_cpu(tensor)
    if same.is_floating_point() or same.is_complex():
        same.fill_(float("nan"))
    else:
        same.fill_(1 if same.dtype is torch.bool else torch.iinfo(same.dtype).max)


def _strided(base: Tensor, like: Tensor) -> Tensor:
    """A tensor in the memory of `base` with the dtype, shape, strides and offset of `like`."""
    shape, strides, offset = like.size(), like.stride(), like.storage_offset()
    if base.dtype is like.dtype:
        return _aten.as_strided.default.redispatch(_CPU_KEYS, base, shape, strides, offset)
    found = _allocate(0, like.dtype, base.device.index)
    storage = base.untyped_storage()
    set_ = _aten.set_.source_Storage_storage_offset
    return set_.redispatch(_CPU_KEYS, found, storage, offset, shape, strides)


def from_cpu(computed: Tensor, index: int | None = None) -> Tensor:
    """A new tensor of a device, the current one by default, with this content."""
    storage = computed.untyped_storage()
    base = _allocate(storage.nbytes() // computed.dtype.itemsize, computed.dtype, index)
    ctypes.memmove(base.data_ptr(), storage.data_ptr(), storage.nbytes())
    return _strided(base, computed)


# -------------------------------------------------------------------------------------- operations


@dataclass
class _State:
    is_used: bool = False
    """Whether the device is in use: torch calls that initialized."""
    devices: set[int] = field(default_factory=set)
    """The indices of those that were used."""
    copies_in: list[Callable[[], object]] = field(default_factory=list)
    """Copies from pinned memory, which happen before the next operation."""
    copies_out: list[tuple[int, int, Callable[[], object]]] = field(default_factory=list)
    """Copies to pinned memory, which happen when the host waits for their stream: its number, and
    theirs there."""
    operations: int = 0
    """How many the device has computed in this process."""


_state = _State()
_pinned: dict[int, Any] = {}
"""By address: a weak reference to a storage in pinned memory."""


def devices_used() -> set[int]:
    """The indices of the devices that this process has used."""
    return _state.devices


def operations() -> int:
    """How many the device has computed in this process."""
    return _state.operations


def is_sim(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def run_queued() -> None:
    """Do what the device does before its next operation."""
    while _state.copies_in:
        _state.copies_in.pop(0)()


def synchronize(device: object = None) -> None:
    """Wait until everything that was queued has happened."""
    torch.accelerator.synchronize()


def _on_host_waits() -> None:
    run_queued()
    waiting, _state.copies_out = _state.copies_out, []
    for stream, number, copy in waiting:
        if streams.has_happened(stream, number):
            copy()
        else:
            _state.copies_out.append((stream, number, copy))


def wait_for_stream() -> None:
    """What the host does when it reads: wait for what was queued in the current stream."""
    torch.accelerator.current_stream().synchronize()


_READING = frozenset(("aten::_local_scalar_dense", "aten::equal"))
_INDEXING = frozenset(
    ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
)


def start(op: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """The device begins an operation on these tensors."""
    run_queued()
    _state.operations += 1
    streams.touch(str(op), reads, writes)


def read_back(op: Any) -> None:
    """The host waits for an operation's result."""
    host.reads.append(_line(str(op)))
    wait_for_stream()


def _note(op: Any, args: Sequence[Any]) -> None:
    """Note that the host reads, if this operation does on a real device."""
    name = op._schema.name
    if name in _INDEXING:
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        reads = bool(masks)
        if any(not is_sim(x) for x in args[1] if x is not None):
            host.uploads.append(_line(str(op)))
    else:
        reads = name in _READING or torch.Tag.dynamic_output_shape in op.tags
    if reads:
        read_back(op)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute any operation by the CPU's kernel."""
    args = _without_numbers(op, args)
    _check_devices(op, tree_leaves((args, kwargs)))
    start(op, *_reads_and_writes(op, args, kwargs))
    _note(op, args)
    given: dict[int, Tensor] = {}
    memory: dict[int, Tensor] = {}

    def enter(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not is_sim(value):
            return value
        same = on_cpu(value)
        given[id(same)] = value
        memory[same.untyped_storage().data_ptr()] = value
        kept.append(same)
        return same

    kept: list[Tensor] = []  # while it runs, an id means one tensor
    inside = tree_map(enter, args), tree_map(enter, kwargs)
    index = _index(tree_leaves((args, kwargs)))
    if any(argument.name == "generator" for argument in op._schema.arguments):
        inside = _with_generator(op, index, *inside)
    outputs = {}
    for name in _outputs(op):
        if is_sim(out := kwargs.get(name)):
            outputs[name] = inside[1][name] = torch.empty(0, dtype=out.dtype, device="cpu")
            given[id(outputs[name])] = out
    computed = op(*inside[0], **inside[1])
    for name, value in outputs.items():
        out = kwargs[name]
        on_cpu(out if out.shape == value.shape else _resize_(out, value.shape)).copy_(value)

    def leave(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in given:
            return given[id(value)]
        at = value.untyped_storage().data_ptr()
        return _strided(memory[at], value) if at in memory else from_cpu(value, index)

    return tree_map(leave, computed)


def _index(leaves: list[Any]) -> int:
    """Of the device that computes: that is asked for, or has the tensors, or the current one."""
    for leaf in leaves:
        if isinstance(leaf, torch.device) and leaf.type == NAME and leaf.index is not None:
            return int(leaf.index)
    return next((leaf.device.index for leaf in leaves if is_sim(leaf)), streams.device)


_NUMBERS = {
    bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128
}  # fmt: skip


def _without_numbers(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch hands over a number in place of the tensor that it has made of it."""
    return tuple(
        torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")
        if isinstance(value, int | float | complex) and argument.type.kind() == "TensorType"
        else value
        for value, argument in zip(args, op._schema.arguments, strict=False)
    )


def _reads_and_writes(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors whose memory an operation reads and writes; a view does neither."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, argument in enumerate(op._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        aliased = argument.alias_info
        if aliased is None or aliased.is_write:
            tensors = [leaf for leaf in tree_leaves(value) if is_sim(leaf)]
            (reads if aliased is None else writes).extend(tensors)
    return reads, writes


def _outputs(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments if argument.is_out]


def _with_generator(op: Any, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    at = names.index("generator")
    found = args[at] if at < len(args) else kwargs.get("generator")
    if found is None:
        found = default_generators[index]
    elif found._cdata not in {each._cdata for each in _generators}:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    if at < len(args):
        return (*args[:at], found, *args[at + 1 :]), kwargs
    return args, {**kwargs, "generator": found}


def _check_devices(op: Any, leaves: list[Any]) -> None:
    if op._schema.name in _INDEXING:
        return
    own = torch.device(NAME, next((leaf.device.index for leaf in leaves if is_sim(leaf)), 0))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device != own and (is_sim(leaf) or leaf.dim() > 0):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{own} and {leaf.device}! (in {op})"
            )


def _copy_from(src: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    run_queued()
    number = streams.touch("copy", [src] if is_sim(src) else [], [dst] if is_sim(dst) else [])
    if is_sim(src) and is_sim(dst):
        on_cpu(dst).copy_(on_cpu(src))
    elif is_sim(src):
        out, back = dst.detach(), on_cpu(src).clone()
        if non_blocking and is_pinned(dst):
            out.view(torch.uint8).fill_(0xFF)
            _state.copies_out.append((streams.current, number, partial(out.copy_, back)))
        else:
            host.reads.append(_line("copy to the CPU"))
            wait_for_stream()
            out.copy_(back)
    elif non_blocking and is_pinned(src):
        _state.copies_in.append(lambda: on_cpu(dst).copy_(src))
    else:
        if src.numel():
            host.uploads.append(_line("copy from the CPU"))
        on_cpu(dst).copy_(src)
    return dst


def _copy_(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_from(src, dst, non_blocking)


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    meta = torch.empty(
        size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
    )
    return _strided(_allocate(meta.numel(), meta.dtype, _index([device])), meta)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    count = meta.untyped_storage().nbytes() // meta.itemsize
    return _strided(_allocate(count, meta.dtype, _index([device])), meta)


def _resize_(tensor: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    meta = torch.empty(size, dtype=tensor.dtype, device="meta")
    if meta.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
        fresh = _allocate(meta.numel(), tensor.dtype, tensor.device.index)
        kept = min(fresh.untyped_storage().nbytes(), tensor.untyped_storage().nbytes())
        ctypes.memmove(fresh.data_ptr(), tensor.untyped_storage().data_ptr(), kept)
        storage = fresh.untyped_storage()
    else:
        storage = tensor.untyped_storage()
    set_ = _aten.set_.source_Storage_storage_offset
    return set_.redispatch(_CPU_KEYS, tensor, storage, 0, meta.size(), meta.stride())


def _on_metadata(op: Any) -> Callable[..., Any]:
    """A kernel of the CPU that looks at shapes and strides only, and is right for any device."""
    return lambda *args, **kwargs: op.redispatch(_CPU_KEYS, *args, **kwargs)


def _convolution_overrideable(*args: Any) -> Tensor:
    return _fallback(_aten.convolution.default, *args)


def _convolution_backward_overrideable(grad: Any, x: Any, weight: Any, *args: Any) -> Any:
    *settings, mask = args
    return _fallback(_aten.convolution_backward.default, grad, x, weight, None, *settings, mask)


def _lstm_cell(x: Tensor, h: Tensor, cx: Tensor, b_x: Any = None, b_h: Any = None) -> Any:
    gates = x + h if b_x is None else x + h + b_x + b_h
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - cy.tanh().square()) + (0 if grad_cy is None else grad_cy)
    parts = (
        grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g),
        grad_hy * cy.tanh() * o * (1 - o),
    )  # fmt: skip
    gates = torch.cat(parts, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


# ------------------------------------------------------------------------------- pinned memory


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    reference = _pinned.get(tensor.untyped_storage().data_ptr())
    return reference is not None and not torch.UntypedStorage._expired(reference)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    found.copy_(tensor)
    storage = found.untyped_storage()
    _pinned[storage.data_ptr()] = storage._weak_ref()
    return found


# ---------------------------------------------------------------------------------- generators


class SimGenerator(torch._C.Generator):
    """A generator of a device. Its numbers are those of a CPU's generator."""

    index = 0

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, self.index)


_generators: weakref.WeakSet[SimGenerator] = weakref.WeakSet()
"""All there are: torch hands an operation another object for the same generator."""


def _new_generator(index: int) -> SimGenerator:
    generator = SimGenerator()
    generator.index = index
    _generators.add(generator)
    return generator


class _GeneratorType(type):
    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        asked = torch.device(device)
        return _new_generator(_index([asked])) if asked.type == NAME else torch._C.Generator(device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class Generator(metaclass=_GeneratorType):
    """torch.Generator, which Python cannot teach a device."""


def _visible() -> list[str]:
    devices = [str(number) for number in range(int(os.environ.get("SIM_DEVICES", "1")))]
    return [name for name in os.environ.get(VARIABLE, ",".join(devices)).split(",") if name]


default_generators: list[SimGenerator] = []
"""Of each device that this process sees, from `install` on."""


# ---------------------------------------------------------------------------------- autocast

_LOWER = (
    *("mm", "addmm", "matmul", "linear", "bmm", "baddbmm", "addbmm", "mv", "conv1d", "conv2d"),
    *("conv3d", "convolution", "scaled_dot_product_attention", "einsum", "prelu"),
)
_FLOAT32 = (
    *("softmax.int", "log_softmax.int", "nll_loss", "nll_loss_nd", "cross_entropy_loss"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "layer_norm", "group_norm", "exp", "log"),
    *(
        "sum",
        "sum.dim_IntList",
        "prod",
        "cumsum",
        "norm.Scalar",
        "binary_cross_entropy_with_logits",
    ),
)


def _autocast(op: Any, is_lower: bool) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if is_lower else torch.float32

        def cast(value: Any) -> Any:
            if not is_sim(value) or not value.is_floating_point() or value.dtype == torch.float64:
                return value
            return value.to(dtype)

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


# -------------------------------------------------------------------------------------- the module


@dataclass(frozen=True)
class Properties:
    name: str
    uuid: str
    major: int = 8
    minor: int = 0
    """Of the compute capability, which torch asks of CUDA."""
    total_memory: int = 2**34
    multi_processor_count: int = 1


class Module(types.ModuleType):
    """torch.sim."""

    default_generators = default_generators
    synchronize = staticmethod(synchronize)

    def device_count(self) -> int:
        return len(_visible())

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return _state.is_used

    def init(self) -> None:
        _state.is_used = True

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return streams.device

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(_number(device))

    def get_device_properties(self, device: Any = None) -> Properties:
        return Properties("Simulated", f"sim-{_visible()[_number(device)]}")

    def manual_seed(self, seed: int) -> None:
        default_generators[streams.device].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return default_generators[_number(device)].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        default_generators[_number(device)].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _number(device: Any) -> int:
    """The index of a device that is given as torch.cuda's functions take it."""
    if device is None or isinstance(device, int):
        return streams.device if device is None else device
    return _index([torch.device(device)])


_library: list[Any] = []
streams: Streams
"""Those of this process, from `install` on."""


def install() -> None:
    """Bring the device to torch, for the rest of this process."""
    if _library:
        return
    import simulated_sparse  # it builds on this module

    default_generators.extend(map(_new_generator, range(len(_visible()))))
    global streams
    module = Module(f"torch.{NAME}")
    if NAME != "cuda":
        _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    streams = simulated_streams.load(KEY, len(_visible()), _on_host_waits, _line)
    if NAME == "cuda":
        _replace_in_torch_cuda(module)
    torch.Generator = Generator  # type: ignore[assignment,misc]
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, KEY)
    simulated_sparse.install(everything)
    torch._C._scatter = _scatter  # type: ignore[attr-defined]
    kernels = torch.library.Library("aten", "IMPL")
    _library.extend((everything, kernels))
    for name, kernel in {
        "_copy_from": _copy_from,
        "record_stream": lambda tensor, stream: None,
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "resize_": _resize_,
        "convolution_overrideable": _convolution_overrideable,
        "convolution_backward_overrideable": _convolution_backward_overrideable,
        "_thnn_fused_lstm_cell": _lstm_cell,
        "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
        "as_strided": _on_metadata(_aten.as_strided.default),
        "view": _on_metadata(_aten.view.default),
        "_reshape_alias": _on_metadata(_aten._reshape_alias.default),
        "unfold": _on_metadata(_aten.unfold.default),
        "set_.source_Storage": _on_metadata(_aten.set_.source_Storage),
        "set_.source_Storage_storage_offset": _on_metadata(
            _aten.set_.source_Storage_storage_offset
        ),
    }.items():
        kernels.impl(name, kernel, KEY)
    for name in ("_assert_async", "_assert_async.msg"):  # as CUDA has: nobody waits
        base, _, overload = name.partition(".")
        op = getattr(getattr(_aten, base), overload or "default")
        kernels.impl(name, partial(_fallback, op), KEY)
    kernels.impl("is_pinned", is_pinned, "CPU")
    kernels.impl("_pin_memory", _pin_memory, "CPU")
    if NAME == "cuda":
        kernels.impl("copy_", _copy_, KEY)
    else:
        _install_autocast(everything, kernels)
    torch.serialization.register_package(0, lambda storage: None, _load_storage)
    clone = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = _clone_of(clone)  # type: ignore[method-assign]


def _install_autocast(everything: Any, kernels: Any) -> None:
    """Rules of autocast, which torch has for CUDA, but not for a device that it does not know."""
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, is_lower in ((_LOWER, True), (_FLOAT32, False)):
        for name in names:
            base, _, overload = name.partition(".")
            op = getattr(getattr(_aten, base), overload or "default")
            kernels.impl(name, _autocast(op, is_lower), "AutocastPrivateUse1")


def _replace_in_torch_cuda(module: Module) -> None:
    """torch.cuda answers for the simulated device."""
    for name in vars(Module):
        if not name.startswith("__"):
            setattr(torch.cuda, name, getattr(module, name))
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True  # type: ignore[assignment]


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any
) -> tuple[Tensor, ...]:
    """What nn.DataParallel calls, which torch has for CUDA alone: the batch goes to the device, in
    a stream if one is given."""
    (index,) = devices  # a process uses one device
    with streams[0] if streams else nullcontext():
        return (tensor.to(torch.device(NAME, index), non_blocking=True),)


def _load_storage(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """What torch.load does with a storage that was on the device."""
    if not location.startswith(NAME):
        return None
    return _copy_storage(storage, _number(location))


def _copy_storage(storage: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
    fresh = _allocate(storage.nbytes(), torch.uint8, index).untyped_storage()
    ctypes.memmove(fresh.data_ptr(), storage.data_ptr(), storage.nbytes())
    return fresh


def _clone_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != NAME:
            return original(storage)
        return _copy_storage(storage, storage.device.index)

    return clone
