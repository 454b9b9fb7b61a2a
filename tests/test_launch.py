"""`instep run`: what a rank sees, and what the user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import instep
from instep import cli
from instep.errors import CommandLineError
from instep.launch import default_ranks
from instep.launch.job import Job
from instep.launch.ranks.rank_variables import threads_per_rank
from instep.process import procfs
from launching import Launch, free_port
from test_stalls import read_until

pytestmark = pytest.mark.launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


def environments(launch: Launch, size: int, **environ: str) -> list[dict[str, str]]:
    script = launch.script("tell(rank, dict(os.environ))")
    assert launch.run("-n", size, script, environ=environ).returncode == 0
    return [environ for _, environ in launch.events(size)]


def test_the_supervisor_imports_neither_torch_nor_numpy() -> None:
    code = "import instep.cli, sys; print({'torch', 'numpy'} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "set()\n"


def test_every_rank_learns_its_place(launch: Launch) -> None:
    seen = environments(launch, 3)
    for rank, environ in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert {name: environ[name] for name in expected} == expected
    assert len({environ["INSTEP_FAILURE_FILE"] for environ in seen}) == 3
    for name in ("INSTEP_JOB", "MASTER_PORT", "PYTHONHASHSEED"):
        assert len({environ[name] for environ in seen}) == 1


def test_a_slow_start_is_mentioned_once(launch: Launch) -> None:
    script = launch.script("")
    waits = (
        "import os\nif 'RANK' in os.environ:\n    os.read(os.open(os.environ['MEETING'], 2), 1)\n"
    )
    (launch.folder / "sitecustomize.py").write_text(waits)
    slow = {"INSTEP_ARRIVAL_NOTICE": "0", "PYTHONPATH": str(launch.folder)}
    with launch.start("-n", "2", script, environ=slow) as process:
        told = (
            r"instep: still starting: 2 of 2 ranks on this host \(they import PyTorch, or wait for "
            r"other ranks\)\.$"
        )
        read_until(process, told)
        launch.call(2)
        done = launch.end_of(process)
    assert done.returncode == 0
    assert "still starting" not in done.stderr


def test_two_jobs_have_two_names_and_a_job_inside_one_carries_its_name(launch: Launch) -> None:
    first, second = environments(launch, 1), environments(launch, 1)
    assert first[0]["INSTEP_JOB"] != second[0]["INSTEP_JOB"]
    inner = environments(launch, 1, INSTEP_JOB="outer", INSTEP_STORE_FD="99", RANK="7")
    assert inner[0]["INSTEP_JOB"].startswith("outer.")
    assert inner[0]["RANK"] == "0"


def test_the_cores_are_shared_out_among_the_ranks(launch: Launch) -> None:
    for size in (1, 2, 5):
        threads = str(threads_per_rank(size))
        assert int(threads) == max(1, threads_per_rank(1) // size)
        for environ in environments(launch, size):
            assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == threads


def test_what_the_user_has_set_stays(launch: Launch) -> None:
    chosen = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "lo,eth9", "PYTHONHASHSEED": "5"}
    (environ,) = environments(launch, 1, **chosen)
    assert {name: environ[name] for name in chosen} == chosen
    assert "MKL_NUM_THREADS" not in environ  # it follows the user's OMP_NUM_THREADS
    for random in ("", "random"):  # another order of sets on each rank
        (environ,) = environments(launch, 1, PYTHONHASHSEED=random)
        assert environ["PYTHONHASHSEED"] == "0"
    (environ,) = environments(launch, 1, MKL_NUM_THREADS="3")
    assert environ["MKL_NUM_THREADS"] == "3"


def test_an_outer_launcher_is_not_heard(launch: Launch) -> None:
    outer = [
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK"),
        *("PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "HOROVOD_RANK"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID"),
    ]
    (environ,) = environments(launch, 1, **dict.fromkeys(outer, "4"), SLURM_JOB_ID="17")
    assert set(outer) & set(environ) == set()
    assert environ["SLURM_JOB_ID"] == "17"


def test_rank_0_holds_the_socket_at_which_the_others_find_it(launch: Launch) -> None:
    script = launch.script("""
        import socket
        port = int(os.environ["MASTER_PORT"])
        if rank == 0:
            store = socket.socket(fileno=int(os.environ["INSTEP_STORE_FD"]))
            assert not store.get_inheritable()
            assert store.getsockname() == ("127.0.0.1", port)
            store.listen()
            meeting.come()
            greetings = [store.accept()[0].makefile().read() for _ in range(size - 1)]
            tell(sorted(greetings))
        else:
            assert "INSTEP_STORE_FD" not in os.environ
            meeting.wait_for(1)
            meeting.come()
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(f"rank {rank}".encode())
    """)
    assert launch.run("-n", 3, script).stderr == ""
    assert launch.event() == [["rank 1", "rank 2"]]


@pytest.mark.parametrize(
    "begins",
    [
        "dist.init_process_group('gloo', timeout=limit)",
        pytest.param("init()", marks=pytest.mark.nightly),
    ],
)
def test_a_script_may_say_itself_where_its_ranks_meet(launch: Launch, begins: str) -> None:
    """Rank 0 listened on the socket of `instep run`, whatever the script said; rank 1 did not."""
    port = free_port()
    script = launch.script(f"""
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}")
        import socket
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from instep import init
        limit = timedelta(seconds=20)
        {begins}
        total = torch.ones(1)
        dist.all_reduce(total)
        socket.create_connection(("localhost", {port})).close()
        dist.barrier()
        tell(rank, total.item())
        dist.destroy_process_group()
    """)
    ended = launch.run_forked("-n", 2, script, environ={"INSTEP_TIMEOUT": "20"})
    assert ended.returncode == 0, ended.stderr
    assert launch.events(2) == [[0, 2.0], [1, 2.0]]


def test_a_process_group_of_the_script_is_that_of_instep_if_there_is_one(launch: Launch) -> None:
    """As in a script for Horovod that makes a group of its own for its metrics."""
    script = launch.script("""
        import torch
        import torch.distributed as dist
        import horovod.torch as hvd
        hvd.init()
        seen = []
        for ask in ({"rank": 0, "world_size": 3}, {}, {}):
            try:
                dist.init_process_group("gloo", **ask)
            except Exception as error:
                seen.append(type(error).__name__)
        total, pair = torch.ones(2), torch.ones(1)
        dist.all_reduce(total[:1])
        group = dist.new_group([0, 1])
        dist.all_reduce(pair, group=group)
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        seen += [*hvd.allreduce(total, op=hvd.Sum).tolist(), pair.item()]
        dist.init_process_group("gloo")
        tell(rank, *seen)
    """)
    ended = launch.run_forked("-n", 2, script)
    assert ended.returncode == 0, ended.stderr
    said = ["RendezvousError", "ValueError", 4.0, 2.0, 2.0]
    assert launch.events(2) == [[0, *said], [1, *said]]


@pytest.mark.parametrize(
    "is_ours",
    [
        pytest.param(True, id="instep run"),
        pytest.param(False, id="torchrun", marks=pytest.mark.nightly),
    ],
)
def test_ddp_has_the_gradient_of_the_batch_that_instep_divides(
    launch: Launch, is_ours: bool
) -> None:
    """Of 5 rows the ranks have 2 and 3, of the last one 0 and 1."""
    script = launch.script("""
        import instep, torch
        import torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        nn.init.ones_(model.module.weight)
        grads = []
        for (x,) in instep.shard(torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(1.0, 7.0)[:, None]), 5
        )):
            model.zero_grad()
            (2 * model(x)).mean().backward()
            grads.append(model.module.weight.grad.item())
            model.zero_grad()
            model(x).expand(-1, 2).sum().backward()  # an average of sums, as without instep
            grads.append(model.module.weight.grad.item())
            model.zero_grad()
            loss = model(x).sum() / 4
            instep.weight(None)  # a sum, of the whole batch
            loss.backward()
            grads.append(model.module.weight.grad.item())
        tell(rank, *grads)
        dist.destroy_process_group()
    """)
    of_torch = ("TORCHINDUCTOR_CACHE_DIR", *([] if is_ours else ["TMPDIR"]))  # what it leaves
    environ = launch.environ | dict.fromkeys(of_torch, str(launch.folder))
    if is_ours:
        launch.command = ("run",)
        ended = launch.run_forked("-n", 2, script, environ=environ)
    else:
        torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [sys.executable, "-m", *torchrun, script]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert launch.events(2) == [[rank, 6.0, 15.0, 3.75, 12.0, 6.0, 1.5] for rank in range(2)]


@pytest.mark.parametrize(
    ("begins", "limit", "seconds"),
    [
        ("dist.init_process_group('gloo')", "90", [90, 90, 7]),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in [
                ("instep.init()", "", [600, 600, 7]),
                ("dist.init_process_group('gloo')", "", [1800, 1800, 7]),
                ("dist.init_process_group('gloo', timeout=timedelta(0, 80))", "90", [80, 90, 7]),
                ("instep.init(timeout=timedelta(0, 80))", "90", [80, 80, 7]),
            ]
        ),
    ],
)
def test_a_group_without_a_limit_of_its_own_has_that_of_instep(
    launch: Launch, begins: str, limit: str, seconds: list[int]
) -> None:
    script = launch.script(f"""
        from datetime import timedelta
        import instep
        import torch
        import torch.distributed as dist
        {begins}
        groups = dist.group.WORLD, dist.new_group(), dist.new_group(timeout=timedelta(seconds=7))
        cpu = torch.device("cpu")
        tell(*(group._get_backend(cpu).options._timeout.seconds for group in groups))
        dist.destroy_process_group()
    """)
    environ = {"INSTEP_TIMEOUT": limit, "INSTEP_BACKEND": "gloo"}
    ended = launch.run_forked("-n", 2, script, environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert launch.events(2) == [seconds] * 2


AS_PYTHON = """
seen = sorted(globals())
class Here: pass
tell(__name__, __file__, __package__, __doc__, __cached__, getattr(__spec__, "name", None),
     type(__loader__).__name__, seen, sys.argv, sys.path, sys.modules["__main__"].Here is Here,
     Here.__module__, __builtins__ is sys.modules["builtins"])
"""


@pytest.mark.parametrize("arguments", [[], ["--lr", "1", "-n", "5", "--", "-m", "--output", "a b"]])
def test_a_script_runs_as_under_python(launch: Launch, arguments: list[str]) -> None:
    launch.script(AS_PYTHON)
    (launch.folder / "scripts").mkdir()
    link = launch.folder / "scripts" / "link.py"
    link.symlink_to(launch.folder / "train.py")
    for script in ("train.py", "scripts/link.py"):
        as_python = _under_python(launch, script, *arguments)
        assert launch.run("-n", 1, script, *arguments).stderr == ""
        assert launch.event() == as_python


@pytest.mark.parametrize("name", ["package.module", "package", "plain"])
def test_a_module_runs_as_under_python(launch: Launch, name: str) -> None:
    (launch.folder / "package").mkdir()
    for path in ("package/__init__.py", "package/__main__.py", "package/module.py", "plain.py"):
        launch.script(AS_PYTHON if "init" not in path else "", path)
    arguments = ["-m", name, "--lr", "1", "-n", "2", "--", "x"]
    as_python = _under_python(launch, *arguments)
    assert launch.run("-n", 1, *arguments).stderr == ""
    assert launch.event() == as_python


def _under_python(launch: Launch, *command: str) -> object:
    environ = launch.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    with subprocess.Popen([sys.executable, *command], env=environ, cwd=launch.folder):
        return launch.event()


def test_ranks_have_the_options_of_the_launchers_python(launch: Launch) -> None:
    script = launch.script("""
        flags = sys.flags
        tell(flags.optimize, flags.dev_mode, flags.dont_write_bytecode, flags.utf8_mode)
        tell(sys.warnoptions, sys._xoptions)
    """)
    options = ["-B", "-W", "error", "-W", "ignore::UserWarning", "-X", "dev", "-X", "utf8=1", "-OO"]
    as_python = _under_python(launch, *options, script), launch.event()
    command = [sys.executable, *options, "-m", "instep", *launch.command, "-n", "1", script]
    with subprocess.Popen(command, env=launch.environ, cwd=launch.folder):
        assert (launch.event(), launch.event()) == as_python


def test_a_module_without_code_of_python_is_named(launch: Launch) -> None:
    result = launch.run("-n", 1, "-m", "torch._C")
    assert result.returncode == 1
    assert result.stderr.endswith("ImportError: 'torch._C' has no Python code to run\n")


def test_a_module_that_does_not_exist_is_named(launch: Launch) -> None:
    result = launch.run("-n", 2, "-m", "nowhere.module")
    assert result.returncode == 1
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'nowhere'\n")


def test_a_module_that_another_python_may_have_is_looked_for_there(launch: Launch) -> None:
    """Not in that of a script in Python's place, as pyenv has: it may start this very Python."""
    other, wrapper = (launch.folder / name / "python" for name in ("bin", "shims"))
    for path, text in ((other, ""), (wrapper, "#!/bin/sh\n")):
        path.parent.mkdir()
        path.write_text(text)
        path.chmod(0o755)
    script = launch.script("import no_such_package")
    own = launch.environ["PATH"]
    said = [
        launch.run("-n", 1, script, environ={"PATH": path}).stderr
        for path in (f"{other.parent}:{own}", f"{wrapper.parent}:{own}", own)
    ]
    assert all("No module named 'no_such_package'" in each for each in said)
    assert f"the command python of this shell is {other}. If the" in said[0]
    assert not any("of this shell" in each for each in said[1:])


def test_the_script_may_spawn_processes_that_find_its_functions(launch: Launch) -> None:
    script = launch.script("""
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                tell(rank, pool.map(square, [1, 2, 3]))
    """)
    assert launch.run("-n", 2, script).returncode == 0
    assert launch.events(2) == [[0, [1, 4, 9]], [1, [1, 4, 9]]]


def test_exit_handlers_and_threads_still_find_the_script(launch: Launch) -> None:
    script = launch.script("""
        import atexit, pickle
        class State: pass
        def late(): tell(type(pickle.loads(pickle.dumps(State()))) is State)
        atexit.register(late)
    """)
    assert launch.run("-n", 1, script).returncode == 0
    assert launch.event() == [True]


@pytest.mark.parametrize("switch", ["enable", pytest.param("disable", marks=pytest.mark.nightly)])
def test_what_torch_makes_as_it_is_imported_is_permanent(launch: Launch, switch: str) -> None:
    script = launch.script(f"""
        import gc
        gc.{switch}()
        gc.collect(0)  # the next one is some hundred objects away
        began = []
        gc.callbacks.append(lambda phase, info: began.append(phase))
        import importlib.util
        assert importlib.util.find_spec("torch").loader.get_filename().endswith("__init__.py")
        import torch
        tell(began, gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()))
    """)
    assert launch.run("-n", 1, script).returncode == 0
    assert launch.event() == [[], switch == "enable", True]


def test_a_file_that_only_the_last_collection_closes_is_whole(launch: Launch) -> None:
    script = launch.script("""
        class Log:
            def __init__(self):
                self.file, self.itself = open("log", "w"), self
                self.file.write("all of it")
        log = Log()
        import torch
    """)
    assert launch.run("-n", 1, script).returncode == 0
    assert (launch.folder / "log").read_text() == "all of it"


@pytest.mark.parametrize(
    ("tuned", "limited"),
    [
        pytest.param({}, False, id="plain"),
        pytest.param({}, True, id="limited", marks=pytest.mark.nightly),
        pytest.param(
            {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}, False, id="tuned", marks=pytest.mark.nightly
        ),
    ],
)
def test_ranks_keep_memory_that_they_have_freed_in_huge_pages(
    launch: Launch, tuned: dict[str, str], limited: bool
) -> None:
    script = launch.script("""
        import re, resource
        from pathlib import Path
        import torch, instep
        if sys.argv[1] == "True":
            status = Path("/proc/self/status").read_text()
            used = int(re.search(r"VmData:\\s+(\\d+) kB", status)[1]) << 10
            resource.setrlimit(resource.RLIMIT_DATA, (used + (256 << 20), -1))
        instep.init()
        maps = Path("/proc/self/smaps").read_text()
        parts = re.findall(r"\\[heap\\](?:.*\\n)+?VmFlags:(.*)", maps)
        def new_pages():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            held = [torch.ones(4 << 20) for _ in range(3)]
            del held
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        keeps = [new_pages() for _ in range(20)][-1] < 100
        tell(any("hg" in flags.split() for flags in parts), keeps)
    """)
    assert launch.run("-n", 2, script, limited, environ=tuned).returncode == 0
    assert launch.events(2) == [[not (limited or tuned), not tuned]] * 2


def test_rank_0_reads_the_users_input_and_the_others_nothing(launch: Launch) -> None:
    script = launch.script("tell(rank, sys.stdin.read())")
    launch.run("-n", 3, script, stdin=subprocess.PIPE, input="yes\n")
    assert launch.events(3) == [[0, "yes\n"], [1, ""], [2, ""]]


def test_a_terminal_stays_a_terminal_for_rank_0(launch: Launch) -> None:
    script = launch.script("tell(rank, [stream.isatty() for stream in (sys.stdin, sys.stdout)])")
    ours, terminal = os.openpty()
    with launch.start("-n", 2, script, stdin=terminal, stdout=terminal) as process:
        launch.end_of(process)
    os.close(terminal)
    os.close(ours)
    assert launch.events(2) == [[0, [True, True]], [1, [False, False]]]


def test_each_line_of_the_others_has_the_rank_before_it(launch: Launch) -> None:
    script = launch.script("""
        print("out", rank)
        print("err", rank, file=sys.stderr)
        print(f"{rank}: é\\n\\nno end", end="" if rank else "\\n")
    """)
    result = launch.run("-n", 3, script)
    assert sorted(result.stderr.splitlines()) == ["[1] err 1", "[2] err 2", "err 0"]
    others = [line for line in result.stdout.splitlines() if line.startswith("[")]
    for rank in (1, 2):
        mine = [line for line in others if line.startswith(f"[{rank}]")]
        said = [f"out {rank}", f"{rank}: é", "", "no end"]
        assert mine == [f"[{rank}] {line}" for line in said]
    assert len(others) == 8
    assert result.stdout.endswith("\n")


def test_long_lines_stay_whole(launch: Launch) -> None:
    script = launch.script("""
        if rank > 0:
            for _ in range(20):
                print(str(rank) * 100_000)
    """)
    lines = launch.run("-n", 3, script).stdout.splitlines()
    assert sorted(lines) == [f"[{r}] {str(r) * 100_000}" for r in (1, 2) for _ in range(20)]


def test_a_line_is_shown_as_it_is_printed(launch: Launch) -> None:
    script = launch.script("""
        if rank == 1:
            print("step 1")
            forever()
        forever()
    """)
    with launch.start("-n", 2, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[1] step 1\n"
        process.terminate()
        launch.end_of(process)


def test_the_others_can_be_silent(launch: Launch) -> None:
    script = launch.script("""
        print("out", rank)
        print("err", rank, file=sys.stderr)
        if rank == 1: raise ValueError("boo")
        forever()
    """)
    result = launch.run("-n", 2, "--output", "rank0", script)
    assert "1" not in result.stdout
    assert "err 1" not in result.stderr
    assert result.stderr.endswith("ValueError: boo\n")


def test_every_rank_can_write_to_files_of_its_own(launch: Launch) -> None:
    script = launch.script("""
        print("out", rank)
        print("err", rank, file=sys.stderr)
        if rank == 1:
            meeting.wait_for(1)
            raise ValueError("boo")
        sys.stdout.flush()
        meeting.come()
    """)
    logs = launch.folder / "new" / "logs"
    result = launch.run("-n", 2, "--output", logs, script)
    assert result.stdout == ""
    assert (logs / "rank0.out").read_text() == "out 0\n"
    assert (logs / "rank0.err").read_text() == "err 0\n"
    assert (logs / "rank1.out").read_text() == "out 1\n"
    failure = (logs / "rank1.err").read_text()
    assert failure.startswith("err 1\nTraceback")
    assert result.stderr.endswith(failure.removeprefix("err 1\n"))
    assert len(list(logs.iterdir())) == 4


def test_a_reader_who_leaves_does_not_stop_the_job(launch: Launch) -> None:
    script = launch.script("""
        if rank == 1:
            tell("there")
            meeting.wait_for(1)
            for _ in range(10_000): print("x" * 100)
            tell("went on")
    """)
    with launch.start("-n", 2, script) as process:
        launch.event()
        assert process.stdout is not None
        process.stdout.close()
        launch.call()
        assert process.wait() == 0
    assert launch.event() == ["went on"]


TWO_HOSTS = ["-n", "2", "--nnodes", "2", "--node-rank", "0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "train.py"], "not '0'"),
        (["-n", "-2", "train.py"], "not '-2'"),
        (["-n", "x", "train.py"], "not 'x'"),
        (["--nnodes", "2", "--node-rank", "0", "train.py"], "say how many ranks each host has"),
        (["train.py", "-n", "2"], "-n comes before the script: instep run -n 2 train.py"),
        (["train.py", "-np", "2"], "-np comes before the script"),
        (["-n", "2", "--pllain", "train.py"], "no option --pllain; did you mean --plain?"),
        (["-n", "2", "--nodes", "2", "train.py"], "did you mean --nnodes?"),
        (["-n", "2", "--lr", "1", "train.py"], "no option --lr. Options of the script come after"),
        (["-n", "2", "-c", "print(1)"], "Each rank reads the program from a file: write it into"),
        (["-n", "2", "python", "train.py"], "Leave python out"),
        (["-n", "2", "note.ipynb"], "it is a notebook. Call instep.spawn in it"),
        (["-n", "2", "folder.module"], "If the module is meant, write -m folder.module."),
        (["-n", "2", "/dev/zero"], "it is no ordinary file"),
        (["-n", "2", "/dev/stdin"], "Each rank reads the program from a file: write it into one"),
        (["-n", "2"], "nothing to run"),
        (["-n", "2", "-m"], "nothing to run"),
        (["-n", "2", "nowhere.py"], "nowhere.py: there is no such file"),
        (["-n", "2", "."], ".: it is a directory"),
        (["-n", "2", "--bogus", "train.py"], "--bogus"),
        (["-n", "2", "--output", "note.ipynb", "train.py"], "note.ipynb: File exists"),
        (["-n", "2", "--output", "/proc/nowhere", "train.py"], "/proc/nowhere"),
        (["-n", "2", "--output", "/proc", "train.py"], "/proc"),
        (["-n", "2", "--nnodes", "2", "train.py"], "--node-rank is missing"),
        (["-n", "2", "--node-rank", "1", "train.py"], "--nnodes is missing"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "2", "train.py"], "--node-rank 2 of"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "1", "train.py"], "--master or --dist-file"),
        ([*TWO_HOSTS, "--master", "here", "train.py"], "HOST:PORT, not 'here'"),
        ([*TWO_HOSTS, "--master", "no.invalid:1", "train.py"], "'no.invalid' does not resolve"),
        ([*TWO_HOSTS, "--master", "198.51.100.1:1", "train.py"], "cannot listen on 198.51.100.1:1"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    launch.script("tell('ran')")
    (launch.folder / "note.ipynb").touch()
    (launch.folder / "folder" / "module.py").parent.mkdir()
    (launch.folder / "folder" / "module.py").touch()
    monkeypatch.chdir(launch.folder)
    for name, value in (launch.environ | {"CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--plain", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("instep: ")
    assert err.count("\n") == 1
    assert said in err
    assert launch.no_event()


def test_many_ranks_on_few_cores_are_mentioned_at_once(launch: Launch) -> None:
    core = min(os.sched_getaffinity(0))
    script = launch.script("tell(rank)")
    ended = launch.run("-n", 3, script, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert ended.stderr.startswith("instep: starts 3 ranks on 1 core; ")
    assert launch.events(3) == [[0], [1], [2]]


def test_without_a_number_there_is_a_rank_for_each_gpu(launch: Launch) -> None:
    script = launch.script("tell(rank, os.environ['WORLD_SIZE'])")
    done = launch.run(script, environ={"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert "instep: 3 ranks, one for each GPU of this host (-n for another number)" in done.stderr
    assert [size for _, size in launch.events(3)] == ["3"] * 3


@pytest.mark.parametrize(
    ("cores", "ranks", "said"),
    [
        (1, 1, "1 rank, for the one core here, as there is no GPU"),
        (4, 4, "4 ranks, one for each core here, as there is no GPU"),
        (64, 8, "8 ranks, each with 8 of the 64 cores here, as there is no GPU"),
    ],
)
def test_without_a_gpu_there_are_as_many_ranks_as_cores_up_to_eight(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cores: int,
    ranks: int,
    said: str,
) -> None:
    monkeypatch.setattr(default_ranks, "count_cores", lambda: cores)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("INSTEP_DEVICE", "cpu")
    assert default_ranks.choose_number_of_ranks(["train.py"], is_one_host=True) == ranks
    assert capsys.readouterr().err == f"instep: {said} (-n for another number)\n"


def test_without_a_number_bitwise_gets_as_many_ranks_as_its_shards_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_ranks, "count_cores", lambda: 6)
    monkeypatch.setenv("INSTEP_DEVICE", "cpu")
    assert default_ranks.choose_number_of_ranks(["t.py"], is_one_host=True, shards=8) == 4
    said = "instep: 4 ranks, as many as --bitwise 8 allows here (-n for another number)\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "words",
    [
        "run -n 3",
        "run --hosts localhost:3",
        "verify -n 1,3",
        "horovodrun -np 3 python",
    ],
)
def test_ranks_that_do_not_fit_into_the_memory_are_refused(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(procfs, "memory_size", lambda: 2 * 128 << 20)
    (script := tmp_path / "train.py").touch()
    assert cli.main([*words.split(), str(script)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("instep: 3 ranks do not fit into the ")
    assert told.endswith("Set INSTEP_RANK_LIMIT=none to start them nevertheless.\n")


def test_more_ranks_than_cores_are_no_error_and_more_than_fit_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(procfs, "memory_size", lambda: 64 * 128 << 20)
    Job(64, ("-m", "train"))
    with pytest.raises(CommandLineError, match="so that 64 would be the most"):
        Job(65, ("-m", "train"))
    monkeypatch.setenv("INSTEP_RANK_LIMIT", "none")
    Job(65, ("-m", "train"))


@pytest.mark.parametrize("ranks", ["-np 2", "--nproc 2", "--nproc-per-node=2", "-n2"])
def test_other_launchers_words_for_the_number_of_ranks_are_taken(
    launch: Launch, ranks: str
) -> None:
    script = launch.script("tell(rank, size)")
    assert launch.run(*ranks.split(), script).returncode == 0
    assert launch.events(2) == [[0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "usage: instep COMMAND ...\n"),
        ("help", "usage: instep COMMAND ...\n"),
        ("check --help", "usage: instep check "),
        ("help run", "usage: instep run [-n N]"),
        ("--version", f"instep {instep.__version__}\n"),
    ],
)
def test_whoever_asks_the_command_for_nothing_is_helped(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(said)


TASKS = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


def test_several_tasks_of_one_host_do_not_each_start_all_its_ranks(launch: Launch) -> None:
    script = launch.script("tell(rank)")
    refused = launch.run("-n", 2, script, environ=TASKS)
    assert refused.returncode == 2
    assert "mpirun of Open MPI started 2 tasks on this host" in refused.stderr
    assert launch.run("-n", 1, "--nnodes", 1, script, environ=TASKS).returncode == 0
    assert launch.event() == [0]


def test_two_dashes_may_stand_before_the_script(launch: Launch) -> None:
    launch.script("tell(sys.argv)")
    assert launch.run("-n", 1, "--", "train.py", "--", "x").returncode == 0
    assert launch.event() == [["train.py", "--", "x"]]


def test_no_rank_asks_for_input_at_its_end(launch: Launch) -> None:
    seen = launch.run("-n", 1, launch.script("sys.exit(3)"), environ={"PYTHONINSPECT": "1"})
    assert "instep: rank 0 of 1 exited with code 3\n" in seen.stderr
    assert seen.stderr.count("Traceback") == 1, "the prompt of this command itself"


@pytest.mark.parametrize("limit", [9, 11])
def test_too_few_open_files_are_said_in_one_line(launch: Launch, limit: int) -> None:
    """With 11 of them Python finds no folder for temporary files."""
    command = [sys.executable, "-m", "instep", "run", "-n", "2", launch.script("")]
    limited = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command]
    seen = subprocess.run(limited, capture_output=True, text=True, check=False)
    lines = seen.stderr.splitlines()
    assert (seen.returncode, len(lines)) == (2, 2)
    assert lines[1] == (
        f"instep: {limit} open files are too few for this process: raise ulimit -n."
    )


def test_help_names_every_choice() -> None:
    command = [sys.executable, "-m", "instep", "run", "--help"]
    seen = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(word in seen.stdout for word in ("prefix", "rank0", "DIR", "rank1.out", "-m"))


def test_a_callback_that_still_runs_at_the_end_of_the_script_aborts_no_rank(launch: Launch) -> None:
    """A group that was not destroyed: its thread is in torch's C++ code when Python ends."""
    script = """
        import threading
        import torch
        import torch.distributed as dist
        import instep.shm

        begun = threading.Event()

        def callback(future):
            begun.set()
            while threading.main_thread().is_alive():
                pass
            for _ in range(10**7):
                pass
            return future.value()

        dist.init_process_group("instep")
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["rank 0 has a callback"])
        work = dist.all_reduce(torch.ones(8), async_op=True)
        if rank == 0:
            later = work.get_future().then(callback)
            store.set("rank 0 has a callback", "")
            begun.wait()
        else:
            work.wait()
    """
    done = launch.run("--plain", "-n", 2, launch.script(script))
    assert (done.returncode, done.stderr) == (0, "")
