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
HOROVOD = os.environ.get("HOROVOD_PYTHON", str(ROOT / ".venv-peers" / "bin" / "python"))
"""The interpreter of an environment in which `scripts/horovod` has installed Horovod."""
OPEN_MPI = ("mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n")


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
    launcher: Sequence[str] = ()
    """Starts ranks that each run all the tests; without one each test starts its ranks."""

    def modules(self, sources: Path) -> list[str]:
        """What the worker loads."""
        if self.module:
            return [self.module] if (sources / self.folder).exists() else []
        folder = sources / self.folder
        return [str(file) for row in self.files for file in sorted(folder.glob(row))]


SUITES = (
    Suite("torch", "PyTorch: distributed_test.py", "Gloo", (2, 3, 4), "torch_spawn"),
    Suite("torch-rpc", "PyTorch: DDP under distributed autograd", "Gloo", (0,), "torch_rpc"),
    Suite(
        "torch-c10d",
        "PyTorch: test_c10d_common.py, _gloo, _object_collectives, _spawn_gloo, test_pg_wrapper.py",
        "Gloo",
        (0,),
        "",
        (
            "test/distributed/test_c10d_common.py",
            "test/distributed/test_c10d_gloo.py",
            "test/distributed/test_c10d_object_collectives.py",
            "test/distributed/test_c10d_spawn_gloo.py",
            "test/distributed/test_pg_wrapper.py",
        ),
        "pytorch",
    ),
    Suite(
        "torch-sources",
        "PyTorch: FSDP2, DTensor, device meshes, checkpoints, join, ZeRO",
        "Gloo",
        (0,),
        "",
        (
            "test/distributed/test_c10d_functional_native.py",
            "test/distributed/test_device_mesh.py",
            "test/distributed/test_functional_api.py",
            "test/distributed/_composable/test_replicate.py",
            "test/distributed/_composable/fsdp/test_fully_shard_*.py",
            "test/distributed/algorithms/test_join.py",
            "test/distributed/optim/test_zero_redundancy_optimizer.py",
            "test/distributed/tensor/test_api.py",
            "test/distributed/tensor/test_convolution_ops.py",
            "test/distributed/tensor/test_dtensor.py",
            "test/distributed/tensor/test_embedding_ops.py",
            "test/distributed/tensor/test_experimental_ops.py",
            "test/distributed/tensor/test_init.py",
            "test/distributed/tensor/test_math_ops.py",
            "test/distributed/tensor/test_matrix_ops.py",
            "test/distributed/tensor/test_optimizers.py",
            "test/distributed/tensor/test_pointwise_ops.py",
            "test/distributed/tensor/test_random_ops.py",
            "test/distributed/tensor/test_tensor_ops.py",
            "test/distributed/tensor/test_utils.py",
            "test/distributed/tensor/parallel/test_*.py",
            "test/distributed/checkpoint/test_dtensor_checkpoint.py",
            "test/distributed/checkpoint/test_file_system_checkpoint*.py",
            "test/distributed/checkpoint/test_save_load_api.py",
            "test/distributed/checkpoint/test_state_dict.py",
            "test/distributed/checkpoint/test_tp_checkpoint.py",
        ),
        "pytorch",
    ),
    Suite(
        "horovod",
        "Horovod: test_torch.py, test_adasum_pytorch.py, test_timeline.py",
        "Horovod",
        (2, 3, 4),
        "",
        (
            "test/parallel/test_torch.py",
            "test/parallel/test_adasum_pytorch.py",
            "test/parallel/test_timeline.py",
        ),
        "horovod",
        ("horovodrun", "-np"),
    ),
    Suite(
        "horovod-single",
        "Horovod: test_torch_elastic.py",
        "Horovod",
        (1,),
        "",
        ("test/single/test_torch_elastic.py",),
        "horovod",
        ("horovodrun", "-np"),
    ),
    *(
        Suite(
            f"jittor-{name}",
            f"Jittor under {title}: test_mpi.py, test_mpi_op.py, test_mpi_batchnorm.py",
            "",
            (2, 3, 4),
            "",
            tuple(
                f"python/jittor/test/test_{each}.py" for each in ("mpi", "mpi_op", "mpi_batchnorm")
            ),
            "jittor",
            launcher,
        )
        for name, title, launcher in (
            ("openmpi", "Open MPI", OPEN_MPI),
            ("mpich", "MPICH", ("mpirun.mpich", "-n")),
        )
    ),
    Suite(
        "apex", "Apex: tests/L0/run_amp", "Apex", (1,), "", ("tests/L0/run_amp/test_*.py",), "apex"
    ),
    Suite(
        "apex-optimizers",
        "Apex: tests/L0/run_optimizers, run_fused_layer_norm",
        "Apex",
        (1,),
        "",
        ("tests/L0/run_optimizers/test_*.py", "tests/L0/run_fused_layer_norm/test_*.py"),
        "apex",
    ),
    Suite(
        "article",
        "tczhangzhi/pytorch-distributed: its scripts",
        "without instep",
        (2,),
        "article",
        folder="article",
    ),
)


def commands(
    suite: Suite, size: int, side: str, sources: Path
) -> list[tuple[list[object], list[Path]]]:
    """The commands of a suite, each with its files of outcomes."""
    made: list[tuple[list[object], list[Path]]] = []
    for number, module in enumerate(suite.modules(sources)):
        name = BUILD / "outcomes" / f"{suite.name}-{size}-{side}-{number}"
        files = [Path(f"{name}.{rank}.json") for rank in range(size if suite.launcher else 1)]
        python = sys.executable if side == OURS or suite.folder != "horovod" else HOROVOD
        words: list[object] = [python, WORKER, module, name]
        if suite.launcher:
            words[:0] = [*launcher(suite, side), size]
        elif suite.name.startswith("torch"):
            words.append("--forked")
        made.append((words, files))
    return made


def launcher(suite: Suite, side: str) -> list[str]:
    """What starts the ranks: on ours `instep horovodrun` in the place of Horovod's own."""
    if suite.folder != "horovod":
        return [*suite.launcher]
    if side == OURS:
        return [sys.executable, "-m", "instep", *suite.launcher]
    return [str(Path(HOROVOD).with_name(suite.launcher[0])), "--gloo", *suite.launcher[1:]]


def environment(suite: Suite, size: int, side: str, sources: Path) -> dict[str, str]:
    """The variables of its processes."""
    path = [ROOT / "src", Path(__file__).parent, BUILD / "site", BUILD / "vision"]
    if not suite.name.startswith("torch"):
        if suite.folder in ("apex", "article") and side != OURS:
            path[:0] = [sources / "apex"]
        return {
            "SUITE_SIDE": side,
            "SUITE_SOURCES": str(sources / suite.folder),
            "SUITE_ON_CPUS": "1" if suite.folder == "apex" else "",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "SUITE_COMPAT": suite.folder if side == OURS else "",
            **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
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
