"""The kinds of accelerators: a row of a table for each, with its variable and its backend.

The standard library is enough to read it. `torch_devices.py` asks torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

_DEVICE = re.compile(r"\d+(\.\d+)?|(GPU|MIG)-.+")
_ROOT = Path("/")


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator."""

    name: str
    """torch's name of this type of device, as in `torch.device(name)`."""
    title: str
    """The word for one of them in messages."""
    backend: str | None
    """Its backend in torch.distributed; None: several ranks cannot share a job on it."""
    variables: tuple[str, ...] = ()
    """The variables that tell which devices a process sees. instep sets the first that is set, and
    else the first."""
    outer: str = ""
    """A variable that is read below the others: they number what it leaves."""
    hidden: str | None = None
    """The value of the variable with which a process sees none; None: there is no such value."""
    files: str = ""
    """A pattern of paths from the root, with one path for each device of the host."""
    content: str | None = None
    """What such a file says, as a regular expression; None: its existence is enough."""
    library: str = ""
    """What brings it to torch: a file beside torch's libraries, or a package."""
    has_streams: bool = True
    """Whether work is queued in streams, of which each thread has a current one."""

    def variable(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The variable that chooses devices there; None where this kind has none."""
        return next((name for name in self.variables if name in environ), None) or next(
            iter(self.variables), None
        )


ACCELERATORS = [
    Accelerator(
        "cuda", "GPU", "nccl", ("CUDA_VISIBLE_DEVICES",), hidden="",
        files="dev/nvidia[0-9]*", library="libtorch_cuda.so",
    ),
    Accelerator(  # ROCm: torch calls it cuda, too
        "cuda", "GPU", "nccl", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        outer="ROCR_VISIBLE_DEVICES", hidden="-1",
        files="sys/class/kfd/kfd/topology/nodes/*/gpu_id", content=r"0*[1-9]\d*",
        library="libtorch_hip.so",
    ),
    Accelerator(
        "xpu", "XPU", "xccl", ("ZE_AFFINITY_MASK",),
        files="sys/class/drm/renderD*/device/vendor", content="0x8086",
        library="libtorch_xpu.so",
    ),
    Accelerator(
        "npu", "NPU", "hccl", ("ASCEND_RT_VISIBLE_DEVICES",),
        files="dev/davinci[0-9]*", library="torch_npu",
    ),
    Accelerator(
        "mlu", "MLU", "cncl", ("MLU_VISIBLE_DEVICES",),
        files="dev/cambricon_dev[0-9]*", library="torch_mlu",
    ),
    Accelerator(
        "musa", "GPU", "mccl", ("MUSA_VISIBLE_DEVICES",),
        files="dev/mtgpu.[0-9]*", library="torch_musa",
    ),
    Accelerator(
        "hpu", "HPU", "hccl", ("HABANA_VISIBLE_MODULES",),
        files="dev/accel/accel[0-9]*", library="habana_frameworks",
    ),
    Accelerator("mps", "GPU", None, library="libtorch_mps.so", has_streams=False),
]  # fmt: skip
"""In the order in which a host's devices are looked for. Any other kind that a package brings to
torch has a row of its own by `register`, or the one that `row_of` makes up."""
KINDS = tuple(sorted({row.name for row in ACCELERATORS}))
"""torch's names of them."""


def register(accelerator: Accelerator) -> None:
    """Put a row before all others, in this process, before its ranks meet."""
    ACCELERATORS.insert(0, accelerator)


def row_of(name: str, *, is_rocm: bool = False) -> Accelerator:
    """The row of a type of device, by torch's name.

    A kind without a row has the backend that torch knows by the name of the device, if any.
    """
    rows = [row for row in ACCELERATORS if row.name == name]
    if not rows:
        return Accelerator(name, name.upper(), name)
    return rows[-1] if is_rocm else rows[0]


# ------------------------------------------------------------------- the devices of a host (pure)


def visible_devices(accelerator: Accelerator, environ: Mapping[str, str], count: int) -> list[str]:
    """The devices that a process may use, as the variable names them.

    `count`: how many the host has, which a process without the variable sees.
    """
    variable = accelerator.variable(environ)
    if variable is not None and variable in environ:
        return _names(environ[variable])
    if accelerator.outer in environ:
        count = min(count, len(_names(environ[accelerator.outer])))
    return [str(number) for number in range(count)]


def physical_devices(count: int, visible: str | None) -> list[str]:
    """The physical device of each of `count` visible ones, in the order of the variable.

    A number, or a name in the variable (GPU-…, MIG-…); without the variable, device k is k.
    """
    if visible is None:
        return [str(k) for k in range(count)]
    return _entries(visible)[:count]


def changed_after_init_warning(
    variable: str, visible: str | None, at_start: str | None, names: Sequence[str]
) -> str | None:
    """A warning if torch shows other devices than the variable: it had been read before.

    `names` are those of the devices that torch shows (UUIDs, where there are any); `at_start` is
    the variable's value with which this process was started.
    """
    if visible is None:
        return None
    asked = _entries(visible)
    if len(names) <= len(asked) and all(map(_may_be, asked, names)):
        return None
    started_with = "unset" if at_start is None else repr(at_start)
    devices = f"{len(names)} device{'s' * (len(names) != 1)}"
    return (
        f"{variable} is {visible!r}, but torch shows {devices} ({', '.join(names)}): it was set "
        f"after it had been read (it was {started_with} when this process started). Set it before "
        "the process starts; in a script, before anything asks torch.cuda or torch.accelerator, "
        "is_available() included."
    )


def _names(visible: str) -> list[str]:
    return [name for name in visible.split(",") if name.strip() not in ("", "-1")]


def _entries(visible: str) -> list[str]:
    """The list ends at the first entry that is no device."""
    return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))


def _may_be(name: str, uuid: str) -> bool:
    """A number may be any device; a name may be abbreviated."""
    return not name.startswith("GPU-") or uuid.startswith(name.removeprefix("GPU-"))


# ------------------------------------------------------------------------ this host, without torch


def count_devices(accelerator: Accelerator, root: Path) -> int:
    """How many of this kind the host has, by its files."""
    if not accelerator.files:
        return 0
    return sum(_is_device(path, accelerator.content) for path in root.glob(accelerator.files))


def is_usable(accelerator: Accelerator) -> bool:
    """Whether the torch that is installed has what this kind needs. Does not import torch."""
    if not accelerator.library.endswith(".so"):
        return not accelerator.library or find_spec(accelerator.library) is not None
    found = find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    return any(Path(folder, "lib", accelerator.library).exists() for folder in folders or ())


def find_on_host(
    environ: Mapping[str, str] = os.environ, root: Path = _ROOT
) -> tuple[Accelerator, list[str]] | None:
    """The kind of accelerator of this host that torch can use, and the devices that a process may
    use, as its variable names them; None where there is none. Does not import torch.

    A variable that is set is believed, whatever torch and the host have.
    """
    found = [
        (accelerator, devices)
        for accelerator in ACCELERATORS
        if (devices := visible_devices(accelerator, environ, count_devices(accelerator, root)))
    ]
    usable = [(accelerator, devices) for accelerator, devices in found if is_usable(accelerator)]
    told = [(row, devices) for row, devices in found if row.variable(environ) in environ]
    return next(iter([*usable, *told]), None)


def _is_device(path: Path, content: str | None) -> bool:
    if content is None:
        return True
    try:
        return re.fullmatch(content, path.read_text().strip()) is not None
    except OSError:
        return False
