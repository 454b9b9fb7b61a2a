"""One script under every real launcher: the numbers of one process, and nothing beyond loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import components
import instep
import trained
from instep import shm
from launching import free_port
from pool import run

pytestmark = pytest.mark.launch

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"
LOOPBACK = ("0100007F:", "00000000000000000000000001000000:")
DROPPED = ("INSTEP", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "GLOO",
           "NCCL", "OMPI_", "PMI", "MPI_", "SLURM_")  # fmt: skip
OPEN_MPI = ["mpirun.openmpi", "--mca", "oob_tcp_if_include", "lo", "--oversubscribe", "--bind-to",
            "none"]  # fmt: skip
MPICH = ["mpirun.mpich"]
PYTHON = [sys.executable]
NIGHTLY = pytest.mark.nightly
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
LAUNCH = [*PYTHON, "-W", "ignore", "-m", "torch.distributed.launch"]


def environment(folder, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    (folder / "tmp").mkdir(exist_ok=True)
    told = {"OMP_NUM_THREADS": "1", "INSTEP_TIMEOUT": "30", "TMPDIR": str(folder / "tmp")}
    told["INSTEP_DIVIDE"] = "always"  # most models here are too small to gain from it
    return kept | root | told | more


def start(folder, *command, **more):
    """Run it to its end; what it leaves in `folder` is the report of each rank."""
    words = [*map(str, command)]
    subprocess.run(words, env=environment(folder, **more), check=True, timeout=100, cwd=folder)
    assert not list((folder / "tmp").glob("instep-*"))


def reports(folder, size, beyond=()):
    """What the ranks left; they listened on loopback only, and on the addresses `beyond`."""
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    allowed = (*LOOPBACK, *(socket.inet_aton(address)[::-1].hex().upper() for address in beyond))
    assert [where for r in found for where in r["listening"] if not where.startswith(allowed)] == []
    return found


@pytest.fixture(scope="module")
def oracle():
    """What one process learns."""
    (learned,) = run(1, trained.train)
    return torch.tensor(learned)


def assert_same(folder, size, oracle, source, beyond=()):
    found = reports(folder, size, beyond)
    for rank, report in enumerate(found):
        assert report["source"] == source
        assert report["world"][:2] == [rank, size]
        assert (torch.tensor(report["learned"]) - oracle).norm() < 1e-6 * oracle.norm()
    return found


COMMANDS = {
    "instep run": ([*PYTHON, "-m", "instep", "run", "-n", "{n}"], "instep run", (), "shm"),
    "Open MPI": ([*OPEN_MPI, "-n", "{n}", *PYTHON], "mpirun of Open MPI", ("Open MPI",), "gloo"),
    "MPICH": ([*MPICH, "-n", "{n}", *PYTHON], "mpirun of MPICH or Intel MPI", ("MPICH",), "shm"),
    "torchrun": ([*TORCHRUN, "--nproc-per-node", "{n}"], "torchrun", (), "gloo"),
}
NAMES = {"gloo": "gloo", "shm": shm.NAME}
"""Each backend listens on loopback only. torch.distributed.launch is torchrun; see below."""
AT_NIGHT = ("instep run", "MPICH", "torchrun")
"""By day test_hosts.py trains under the first, and test_interrupts.py under the second."""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("command", "source", "backend"),
    [
        pytest.param(
            *(words, source, backend), id=name,
            marks=[components.needs(*needed), *([NIGHTLY] if name in AT_NIGHT else [])],
        )
        for name, (words, source, needed, backend) in COMMANDS.items()
    ],
)  # fmt: skip
def test_same_as_one_process(tmp_path, oracle, command, source, backend, size):
    words = [word.format(n=size) for word in command]
    start(tmp_path, *words, TESTS / "trained.py", tmp_path, INSTEP_BACKEND=backend)
    found = assert_same(tmp_path, size, oracle, source)
    assert {report["backend"] for report in found} == {NAMES[backend]}


@components.needs("Slurm")
@pytest.mark.parametrize("spread", [("-N1", "-n2"), pytest.param(("-N2", "-n3"), marks=NIGHTLY)])
def test_same_under_srun(tmp_path, oracle, cluster, spread):
    start(tmp_path, "srun", *spread, *PYTHON, TESTS / "trained.py", tmp_path, **cluster.environ)
    assert_same(tmp_path, int(spread[1][2:]), oracle, "srun")


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3])
def test_same_when_spawned(tmp_path, oracle, size):
    ranks = instep.spawn(learn, (str(tmp_path),), nprocs=size)
    assert ranks == list(range(size))
    assert_same(tmp_path, size, oracle, "instep run")


def learn(local_rank, folder):
    torch.set_num_threads(1)
    trained.main(folder)
    return local_rank


@NIGHTLY
@components.needs("Slurm")
@pytest.mark.parametrize("how", ["instep run", "spawn"])
def test_one_task_per_node_starts_the_ranks_of_the_node(tmp_path, oracle, cluster, how):
    if how == "spawn":
        script = tmp_path / "spawning.py"
        script.write_text(
            "import sys, instep, trained\n"
            "def worker(gpu, folder):\n"
            "    trained.main(folder)\n"
            "    return gpu, instep.rank\n"
            "here = instep.spawn(worker, sys.argv[1:], nprocs=2)\n"
            "import os; node = int(os.environ['SLURM_PROCID'])\n"
            "assert here == [(0, 2 * node), (1, 2 * node + 1)], here\n"
        )
        command = [script]
    else:
        command = ["-m", "instep", "run", "-n", "2", TESTS / "trained.py"]
    task = ["srun", "-N2", "--ntasks-per-node=1", *PYTHON, *command, tmp_path]
    start(tmp_path, *task, PYTHONPATH=_path(), **cluster.environ)
    assert_same(tmp_path, 4, oracle, "instep run")
    assert [report["world"][2:] for report in reports(tmp_path, 4)] == [
        [0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1],
    ]  # fmt: skip


def _path():
    return os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


# ------------------------------------------------- scripts that call init_process_group themselves


@pytest.mark.parametrize(
    ("command", "method"),
    [
        pytest.param([*PYTHON, "-m", "instep", "run", "-n", "2"], "env://", id="instep run",
                     marks=NIGHTLY),
        pytest.param([*PYTHON, "-m", "instep", "run", "-n", "2"], "tcp://127.0.0.1:{port}",
                     id="instep run, tcp", marks=NIGHTLY),
        pytest.param([*OPEN_MPI, "-n", "2", *PYTHON, "-m", "instep"], "env://",
                     id="Open MPI", marks=components.needs("Open MPI")),
        pytest.param([*MPICH, "-n", "2", *PYTHON, "-m", "instep"], "env://",
                     id="MPICH", marks=[components.needs("MPICH"), NIGHTLY]),
        pytest.param([*LAUNCH, "--nproc_per_node", "2", "-m", "instep"], "env://", id="launch",
                     marks=NIGHTLY),
        pytest.param([*LAUNCH, "--use-env", "--nproc_per_node", "2", "-m", "instep"], "env://",
                     id="launch --use-env", marks=NIGHTLY),
    ],
)  # fmt: skip
def test_a_script_that_makes_its_process_group_itself(tmp_path, command, method):
    words = [TESTS / "unaided.py", "--method", method.format(port=free_port()), tmp_path]
    start(tmp_path, *command, *words)
    assert_unaided(reports(tmp_path, 2))


LATE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
open(f"{sys.argv[1]}/total{dist.get_rank()}", "w").write(str(total.item()))
dist.destroy_process_group()
"""


def test_ranks_of_a_script_that_ran_unedited_until_then_meet_again(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    start(tmp_path, *PYTHON, "-m", "instep", "run", "-n", "2", "late.py", tmp_path)
    assert [(tmp_path / f"total{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]


@components.needs("Slurm")
def test_such_a_script_under_srun(tmp_path, cluster):
    command = ["srun", "-N2", "-n2", *PYTHON, "-m", "instep", TESTS / "unaided.py", tmp_path]
    start(tmp_path, *command, **cluster.environ)
    assert_unaided(reports(tmp_path, 2), local_ranks=[0, 0])


def assert_unaided(found, local_ranks=(0, 1)):
    assert [(r["total"], r["part"]) for r in found] == [(3.0, 2.0)] * 2
    assert [r["local_rank"] for r in found] == [*local_ranks]
    assert {r["variables"]["MASTER_ADDR"] for r in found} <= {"127.0.0.1", "localhost"}
    assert [r["variables"]["LOCAL_RANK"] for r in found] == [*map(str, local_ranks)]


# --------------------------------------------------------- the documents' own commands, their toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """What examples/toy.py learns in one process."""
    where = tmp_path_factory.mktemp("toy")
    start(where, *PYTHON, EXAMPLES / "toy.py", "--save", where / "one.pt")
    return torch.load(where / "one.pt")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        pytest.param(["srun", "-n2", "--ntasks-per-node=2", *PYTHON], [], id="srun -n",
                     marks=[components.needs("Slurm"), NIGHTLY]),
        pytest.param(["srun", "-N2", *PYTHON], ["--dist-file", "dist_file"], id="srun -N2",
                     marks=[components.needs("Slurm"), NIGHTLY]),
        pytest.param([*LAUNCH, "--nproc_per_node", "2"], [], id="launch", marks=NIGHTLY),
    ],
)  # fmt: skip
def test_the_documents_commands(tmp_path, toy, request, command, arguments):
    more = request.getfixturevalue("cluster").environ if command[0] == "srun" else {}
    start(tmp_path, *command, EXAMPLES / "toy.py", *arguments, "--save", "many.pt", **more)
    many = torch.load(tmp_path / "many.pt")
    for name, value in toy.items():
        assert (many[name] - value).norm() < 1e-5 * value.norm(), name
