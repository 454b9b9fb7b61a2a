"""The table of accelerators, and what a host's files and variables tell without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instep.distributed.identity import accelerators, torch_devices
from instep.distributed.identity.accelerators import ACCELERATORS, find_on_host, row_of
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import devices
from instep.errors import BackendError, InstepWarning
from instep.launch.worker import torch_init
from instep.unedited import launcher_env

CUDA, ROCM = (row for row in ACCELERATORS if row.name == "cuda")
KFD = "sys/class/kfd/kfd/topology/nodes"
DRM = "sys/class/drm"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a host without devices, on which every kind could be used."""
    monkeypatch.setattr(accelerators, "is_usable", lambda row: True)
    return tmp_path


def write(host: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text(content)


@pytest.mark.parametrize(
    ("files", "environ", "name", "devices"),
    [
        ({}, {}, None, []),
        ({"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""}, {}, "cuda", ["0", "1"]),
        (
            {"dev/davinci2": "", "dev/davinci3": "", "dev/davinci_manager": ""},
            {},
            "npu",
            ["0", "1"],
        ),
        ({"dev/davinci0": ""}, {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, "npu", ["4", "5"]),
        ({f"{KFD}/0/gpu_id": "0\n", f"{KFD}/1/gpu_id": "51110\n"}, {}, "cuda", ["0"]),
        ({f"{DRM}/renderD128/device/vendor": "0x8086\n"}, {}, "xpu", ["0"]),
        ({f"{DRM}/renderD128/device/vendor": "0x10de\n"}, {}, None, []),
        ({"dev/nvidia0": ""}, {"CUDA_VISIBLE_DEVICES": ""}, None, []),
        ({"dev/cambricon_dev0": "", "dev/cambricon_ctl": ""}, {}, "mlu", ["0"]),
        ({"dev/mtgpu.0": "", "dev/mtgpu.1": ""}, {"MUSA_VISIBLE_DEVICES": "1"}, "musa", ["1"]),
        ({"dev/accel/accel0": ""}, {}, "hpu", ["0"]),
    ],
)
def test_the_devices_of_a_host(
    host: Path,
    files: dict[str, str],
    environ: dict[str, str],
    name: str | None,
    devices: list[str],
) -> None:
    write(host, files)
    found = find_on_host(environ, host)
    assert (found and found[0].name, found[1] if found else []) == (name, devices)


@pytest.mark.parametrize(
    ("environ", "variable", "devices"),
    [
        ({}, "HIP_VISIBLE_DEVICES", ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, "CUDA_VISIBLE_DEVICES", ["3", "1"]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3,1"}, "HIP_VISIBLE_DEVICES", ["2"]),
        ({"ROCR_VISIBLE_DEVICES": "5"}, "HIP_VISIBLE_DEVICES", ["0"]),  # one task, one GPU
        ({"ROCR_VISIBLE_DEVICES": "5,7"}, "HIP_VISIBLE_DEVICES", ["0", "1"]),
    ],
)
def test_amds_variables(environ: dict[str, str], variable: str, devices: list[str]) -> None:
    assert ROCM.variable(environ) == variable
    assert accelerators.visible_devices(ROCM, environ, 4) == devices


def test_a_torch_without_it_does_not_use_what_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch for CPUs on a host with fewer GPUs than ranks starts these ranks."""
    write(tmp_path, {"dev/nvidia0": "", "dev/davinci0": "", "dev/davinci1": ""})
    built = dict.fromkeys(("libtorch_cuda.so", "torch_npu"), False)
    monkeypatch.setattr(accelerators, "is_usable", lambda row: built[row.library])
    assert find_on_host({}, tmp_path) is None
    built["torch_npu"] = True
    found = find_on_host({}, tmp_path)
    assert found is not None
    assert found[0].name == "npu"


def test_what_torch_is_built_with_is_found_beside_it() -> None:
    """torch.backends and this look at the same build."""
    assert accelerators.is_usable(CUDA) == (torch.version.cuda is not None)
    assert accelerators.is_usable(ROCM) == (torch.version.hip is not None)
    assert not accelerators.is_usable(
        accelerators.Accelerator("x", "X", None, library="torch_no_x")
    )
    assert accelerators.is_usable(accelerators.Accelerator("x", "X", None, library="json"))


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({"dev/davinci0": "", "dev/davinci1": ""}, {}, {"ASCEND_RT_VISIBLE_DEVICES": "1"}),
        ({}, {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}, {"ASCEND_RT_VISIBLE_DEVICES": "6"}),
        ({}, {"HIP_VISIBLE_DEVICES": "4,6"}, {"HIP_VISIBLE_DEVICES": "6"}),
        ({}, {"INSTEP_DEVICE": "cpu"}, {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}),
        ({}, {}, {}),
    ],
)
def test_the_ranks_own_device_is_the_only_one_that_a_script_sees(
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    environ: dict[str, str],
    expected: dict[str, str],
) -> None:
    write(host, files)
    fake = dict(environ)
    monkeypatch.setattr("os.environ", fake)
    monkeypatch.setattr(accelerators, "find_on_host", lambda: find_on_host(fake, host))
    launcher_env.set_visible_device(World(1, 2, 1, 2))
    assert fake == environ | expected


def test_a_kind_without_a_row_is_known_by_torchs_name() -> None:
    row = row_of("privateuseone")
    assert (row.title, row.backend, row.variable({})) == ("PRIVATEUSEONE", "privateuseone", None)


def test_ranks_that_cannot_share_a_job_on_the_device_take_the_cpu_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: "mps")
    message = "2 ranks compute on the CPU: .* no backend for mps"
    with pytest.warns(InstepWarning, match=message) as warned:
        assert devices.take_device(World(0, 2, 0, 2)) == torch.device("cpu")
    assert warned[0].filename == __file__, "not a file of instep"


def test_a_backend_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "has no backend 'hccl' of torch.distributed, .* tensors on npu"
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: "npu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "device", lambda kind, index: FakeDevice(kind, index))
    with pytest.raises(BackendError, match=told):
        devices.take_device(World(1, 2, 1, 2))


def test_a_backend_whose_devices_are_not_here_is_refused_in_their_words() -> None:
    told = "'hccl' needs NPUs, .* On a host with NPUs, check ASCEND_RT_VISIBLE_DEVICES"
    with pytest.raises(BackendError, match=told):
        torch_init._check_backend("cpu:gloo,npu:hccl")


class FakeDevice:
    """torch.device of a kind that this torch does not know."""

    def __init__(self, kind: str, index: int) -> None:
        self.type, self.index = kind, index


def test_torchs_backend_of_a_device_comes_before_the_tables() -> None:
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert devices.backend_of(torch.device("cpu")) == "gloo"
