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
    """What it is beside, in the table; "" where the original is not run."""
    sizes: Sequence[int]
    """Numbers of ranks; 0 where the tests have numbers of their own."""
    module: str = ""
    """Ours, with tests of PyTorch's wheel."""
    files: Sequence[str] = ()
    """Or tests in the folder that SUITES names."""
    folder: str = ""
    """The project's folder in there."""
    in_each_rank: bool = False
    """Whether each rank runs the tests, and not each test its ranks."""

    def modules(self, sources: Path) -> list[str]:
        """What the worker loads."""
        if self.module:
            return [self.module]
        folder = sources / self.folder
        return [str(file) for row in self.files for file in sorted(folder.glob(row))]


SUITES = (
    Suite("torch", "PyTorch: distributed_test.py", "Gloo", (2, 3, 4), "torch_spawn"),
    Suite("torch-rpc", "PyTorch: DDP under distributed autograd", "Gloo", (0,), "torch_rpc"),
    Suite(
        "torch-sources",
        "PyTorch: tests in its sources",
        "Gloo",
        (0,),
        "",
        (
            "test/distributed/test_c10d_common.py",
            "test/distributed/test_functional_api.py",
            "test/distributed/test_c10d_functional_native.py",
            "test/distributed/test_c10d_object_collectives.py",
            "test/distributed/test_c10d_logger.py",
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
            "test/distributed/_tensor/test_embedding_ops.py",
            "test/distributed/algorithms/test_join.py",
            "test/distributed/optim/test_zero_redundancy_optimizer.py",
        ),
        "pytorch",
    ),
    Suite(
        "horovod",
        "Horovod: test_torch.py, test_adasum_pytorch.py",
        "",
        (2, 3),
        "",
        ("test/parallel/test_torch.py", "test/parallel/test_adasum_pytorch.py"),
        "horovod",
        in_each_rank=True,
    ),
    Suite(
        "apex", "Apex: tests/L0/run_amp", "Apex", (1,), "", ("tests/L0/run_amp/test_*.py",), "apex"
    ),
)


def commands(
    suite: Suite, size: int, side: str, sources: Path
) -> list[tuple[list[object], list[Path]]]:
    """The commands of a suite, each with its files of outcomes."""
    made: list[tuple[list[object], list[Path]]] = []
    for number, module in enumerate(suite.modules(sources)):
        name = BUILD / "outcomes" / f"{suite.name}-{size}-{side}-{number}"
        files = [Path(f"{name}.{rank}.json") for rank in range(size if suite.in_each_rank else 1)]
        words: list[object] = [sys.executable, WORKER, module, name]
        if suite.in_each_rank:
            words[:0] = [sys.executable, "-m", "instep", "horovodrun", "-np", size]
        elif suite.name.startswith("torch"):
            words.append("--forked")
        made.append((words, files))
    return made


def environment(suite: Suite, size: int, side: str, sources: Path) -> dict[str, str]:
    """The variables of its processes."""
    path = [ROOT / "src", Path(__file__).parent, BUILD / "site"]
    if not suite.name.startswith("torch"):
        if suite.folder == "apex":
            path[:0] = [sources / suite.folder] * (side != OURS)
        return {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "SUITE_COMPAT": str(int(side == OURS)),
        }
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
