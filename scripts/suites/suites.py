"""The suites: which tests of whose, with how many ranks, on ours and on the original."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "suites"
WORKER = Path(__file__).with_name("worker.py")
OURS = "instep"


@dataclass(frozen=True)
class Suite:
    """Tests of another project."""

    name: str
    title: str
    original: str
    """What it is beside, in the table."""
    sizes: Sequence[int]
    """Numbers of ranks; 0 where the tests have numbers of their own."""
    files: Sequence[str] = ()
    """Tests, in the folder that SUITES names; none: they are inside of PyTorch's wheel."""
    folder: str = ""
    """The project's folder in there."""

    def modules(self, sources: Path) -> list[str]:
        """What the worker loads."""
        if not self.files:
            return ["torch_spawn"]
        folder = sources / self.folder if (sources / self.folder).is_dir() else sources
        return [str(folder / file) for file in self.files if (folder / file).exists()]


SUITES = (
    Suite("torch", "PyTorch: distributed_test.py", "Gloo", (2, 3, 4)),
    Suite(
        "torch-sources",
        "PyTorch: tests in its sources",
        "Gloo",
        (0,),
        (
            "test/distributed/test_c10d_common.py",
            "test/distributed/test_functional_api.py",
            "test/distributed/test_c10d_functional_native.py",
            "test/distributed/test_c10d_object_collectives.py",
            "test/distributed/test_c10d_logger.py",
            "test/distributed/test_distributed_spawn.py",
            "test/distributed/_composable/test_replicate.py",
            "test/distributed/_composable/fsdp/test_fully_shard_init.py",
            "test/distributed/_composable/fsdp/test_fully_shard_training.py",
            "test/distributed/tensor/test_api.py",
            "test/distributed/tensor/test_dtensor.py",
            "test/distributed/tensor/test_init.py",
            "test/distributed/tensor/test_math_ops.py",
            "test/distributed/tensor/test_matrix_ops.py",
            "test/distributed/tensor/test_redistribute.py",
            "test/distributed/tensor/test_tensor_ops.py",
            "test/distributed/test_device_mesh.py",
            "test/distributed/_tensor/test_api.py",
            "test/distributed/_tensor/test_device_mesh.py",
            "test/distributed/_tensor/test_dtensor.py",
            "test/distributed/_tensor/test_init.py",
            "test/distributed/_tensor/test_math_ops.py",
            "test/distributed/_tensor/test_matrix_ops.py",
            "test/distributed/_tensor/test_redistribute.py",
            "test/distributed/_tensor/test_tensor_ops.py",
            "test/distributed/optim/test_zero_redundancy_optimizer.py",
        ),
        "pytorch",
    ),
)


def commands(suite: Suite, size: int, side: str, sources: Path) -> list[tuple[list[object], Path]]:
    """The commands of a suite, each with its file of outcomes."""
    made = []
    for number, module in enumerate(suite.modules(sources)):
        file = BUILD / "outcomes" / f"{suite.name}-{size}-{side}-{number}.json"
        made.append(([sys.executable, WORKER, module, file, "--forked"], file))
    return made


def environment(suite: Suite, size: int, side: str) -> dict[str, str]:
    """The variables of its processes."""
    path = [ROOT / "src", Path(__file__).parent, BUILD / "site"]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "BACKEND": "gloo",
        "WORLD_SIZE": str(size or 4),
        "INIT_METHOD": "file:///set/by/each/test",
        "SUITE_BACKEND": OURS if side == OURS else "gloo",
        "SUITE_NOTES": str(BUILD / "outcomes" / f"{suite.name}-{size}-{side}.groups"),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "100",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
