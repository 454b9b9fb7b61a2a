"""`instep horovodrun`, and `import horovod.torch` where there is no Horovod: real launches."""

from __future__ import annotations

import io
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from instep import cli
from instep.compat import finder
from instep.launch import horovodrun
from instep.launch.timeline.events import read_events
from launching import Launch
from pool import run_fresh


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, ("horovodrun",))
    yield launch
    launch.close()


@pytest.mark.launch
def test_a_script_of_horovods_runs_unedited(launch: Launch, tmp_path: Path) -> None:
    script = launch.script(
        """
        import horovod
        import horovod.torch as hvd
        import torch
        hvd.init()
        places = {name: os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")}
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
        tell(rank, places, total, sys.argv[1:], os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"])
        """
    )
    flags = ["-np", 2, "-H", "localhost:4", "--verbose", "--cycle-time-ms", 5, "--mpi"]
    timeline = tmp_path / "job.json"
    flags += ["--stall-check-warning-time-seconds", 7]
    flags += ["--timeline-filename", timeline, "--timeline-mark-cycles"]
    done = launch.run(*flags, "python", "-u", script, "--lr", "0.1", "--")
    assert done.returncode == 0
    assert launch.events(2) == [
        [r, {"RANK": str(r), "SIZE": "2", "LOCAL_RANK": str(r)}, [2, 2], ["--lr", "0.1", "--"], "7"]
        for r in range(2)
    ]
    assert "instep: not used here: --mpi, --cycle-time-ms\n" in done.stderr
    assert f"instep: 2 ranks: {script} --lr 0.1 --\n" in done.stderr
    assert_collectives_in(timeline)


def assert_collectives_in(timeline: Path) -> None:
    sums = [event for event in read_events(timeline) if event["name"].startswith("all_reduce")]
    assert {event["pid"] for event in sums} == {0, 1}
    assert '"CYCLE_START"' in timeline.read_text()


@pytest.mark.launch
@pytest.mark.nightly
def test_any_command_may_be_the_program_of_each_rank(launch: Launch) -> None:
    """A shell starts Python twice on each rank, and both find Horovod's names and the job."""
    script = launch.script(
        """
        import horovod.torch as hvd
        import torch
        hvd.init()
        tell(rank, hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist(), sys.argv[1])
        """
    )
    line = f"python {script} one && python {script} two && exit 4"
    done = launch.run("-np", 2, "--verbose", "bash", "-c", line)
    assert sorted(launch.events(4)) == [[r, [2, 2], n] for r in range(2) for n in ("one", "two")]
    assert done.returncode == 4
    assert f"bash -c {line}\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("python", "a.py", "-v"), ("a.py", "-v")),
        (("python3", "-u", "-m", "pkg"), ("-m", "pkg")),
        (("python", "-c", "1"), (*horovodrun._ANY_COMMAND, sys.executable, "-c", "1")),
        (("a.py",), ("a.py",)),
    ],
)
def test_a_script_runs_in_the_rank_and_anything_else_by_a_module_that_becomes_it(words, command):
    assert horovodrun._command(words) == command


@pytest.mark.launch
@pytest.mark.nightly
def test_a_timeline_by_horovods_variables_has_the_collectives(
    launch: Launch, tmp_path: Path
) -> None:
    script = launch.script(
        """
        import horovod.torch as hvd
        import torch
        hvd.init()
        hvd.allreduce(torch.ones(2), name="loss")
        """
    )
    timeline = tmp_path / "job.json"
    environ = {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    with launch.start("-np", 2, "python", script, environ=environ) as process:
        assert launch.end_of(process).returncode == 0
    assert_collectives_in(timeline)


@pytest.mark.launch
def test_who_is_late_is_named_with_the_line_where_the_others_wait(launch: Launch) -> None:
    """Rank 2 comes when it has been named: nobody sleeps."""
    script = launch.script(
        """
        import horovod.torch as hvd
        import torch
        hvd.init()
        if rank == 2:
            tell("ready")
            meeting.wait_for(1)
        hvd.allreduce(torch.ones(1), name="loss")  # the line
        """
    )
    line = 1 + Path(script).read_text().splitlines().index(
        'hvd.allreduce(torch.ones(1), name="loss")  # the line'
    )
    environ = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    with launch.start("-np", 3, "python", script, environ=environ) as process:
        assert launch.event() == ["ready"]
        assert process.stderr is not None
        words = process.stderr.readline()
        launch.call()
        done = launch.end_of(process)
    assert done.returncode == 0
    assert words.startswith("instep: ranks 0, 1 submitted allreduce.loss ")
    assert words.endswith(f" s ago at {script}:{line}; rank 2 did not yet.\n")


@pytest.mark.launch
@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_rank_that_never_comes_is_an_error_on_the_others(launch: Launch, ends: bool) -> None:
    """It dies, or it does something else for longer than the job wants to wait."""
    script = launch.script(
        f"""
        import horovod.torch as hvd
        import torch
        hvd.init()
        hvd.barrier()
        if rank == 1:
            if {ends}:
                meeting.wait_for(1)
                os.kill(os.getpid(), signal.SIGKILL)
            forever()
        handle = hvd.allreduce_async(torch.ones(1), name="loss")
        meeting.come()
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            tell(str(error))
            raise
        """
    )
    limits = ("--stall-check-warning-time-seconds", 0, "--stall-check-shutdown-time-seconds", 1)
    done = launch.run("-np", 2, *(() if ends else limits), "python", script)
    (words,) = launch.event()
    if ends:
        assert words.startswith("rank 1 of 2 has ended or called shutdown()")
        assert done.returncode == 128 + 9
    else:
        assert words.startswith("rank 0 submitted allreduce.loss 1 s ago at ")
        assert words.endswith("rank 1 did not yet. The job asked to end now rather than wait.")
        assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 5 -H localhost:4 python a.py", "5 ranks, but the hosts have 4 slots"),
        (
            f"-np 2 --min-np 1 -H localhost:1,far:4 python {__file__}",
            "an elastic job has its ranks on this host only, not on far",
        ),
        ("-np 2 -H localhost:1,far:4 python a.py", "cannot run a.py: there is no such file"),
        ("-np 2 -H localhost:x python a.py", "slots of localhost is a whole number, not 'x'"),
        ("-np 2 --hostfile nowhere python a.py", "cannot read the hosts in nowhere"),
        ("python a.py", "say how many ranks: instep horovodrun -np 2"),
        ("-np 0 python a.py", "-np takes the number of ranks, a whole number from 1 up, not '0'"),
        ("-np 2 --fusion-threshold-mb x python a.py", "--fusion-threshold-mb is a whole number"),
        ("-np 2 --min-np 3 python a.py", "--min-np is at most as many"),
        ("-np 2 --min-np x python a.py", "--min-np is a whole number, not 'x'"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 5 1 python a.py", "the smaller one first"),
        ("-np 2 --config-file a.yaml python a.py", "--config-file is not there"),
        (
            f"-np 2 --host-discovery-script ./s.sh python {__file__}",
            "--host-discovery-script ./s.sh does not run",
        ),
        ("-np 2 nonsense a.sh", "there is no command 'nonsense'"),
        ("-np 2 python nowhere.py", "cannot run nowhere.py: there is no such file"),
        ("-np 2", "nothing to run: name a command"),
        ("-np 2 --spam python a.py", "there is no option --spam"),
    ],
)
def test_what_cannot_be_done_as_asked_is_said_in_one_line(words, said, capsys):
    assert cli.main(["horovodrun", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("instep: ")
    assert said in err
    assert err.count("\n") == 1


def test_slots_come_from_a_file_of_hosts(tmp_path: Path, capsys) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nlocalhost slots=3\n\n127.0.0.1\n")
    assert cli.main(["horovodrun", "-np", "5", "--hostfile", str(hosts), "python", "a.py"]) == 2
    assert "the hosts have 4 slots" in capsys.readouterr().err


def test_what_is_there_is_listed(capsys) -> None:
    assert cli.main(["horovodrun", "--check-build"]) == 0
    assert "[X] PyTorch" in capsys.readouterr().out


def test_every_flag_is_used_named_or_refused():
    known = {*horovodrun._UNUSED, *horovodrun._UNUSED_VALUES}
    assert not known & {*horovodrun._ABSENT_VALUES}


def test_the_values_of_a_flag_are_no_part_of_the_program():
    ours = ["horovodrun", "-np", "2", "--tcp", "--blacklist-cooldown-range", "1", "2"]
    theirs = ["python", "train.py", "-np", "3"]
    assert cli._split([*ours, *theirs], cli._parser("horovodrun")) == (ours, theirs)


def test_an_installed_horovod_comes_first(tmp_path: Path) -> None:
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (package / "__init__.py").write_text("real = True")
    code = (
        "from instep.compat import finder; finder.install(); finder.install(); import sys;"
        "assert not any(name.startswith('torch') for name in sys.modules);"
        f"sys.path.insert(0, {str(tmp_path)!r}); import horovod.torch as hvd; print(hvd.real)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "True\n"


def test_a_folder_without_a_package_is_no_installed_horovod(tmp_path: Path) -> None:
    (tmp_path / "horovod" / "examples").mkdir(parents=True)
    code = (
        "from instep.compat import finder; finder.install(); import importlib.util, sys;"
        f"sys.path.insert(0, {str(tmp_path)!r});"
        "print(importlib.util.find_spec('horovod.torch') is not None)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "True\n"


@pytest.mark.slow
def test_what_takes_the_place_of_an_absent_module_is_there():
    for module, place in finder._REPLACED.items():
        for name in re.findall(r"\btorch(?:\.\w+)+", place):
            assert pkgutil.resolve_name(name) is not None, (module, name)


def prints(code: str, lines: list[str]) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue().splitlines() == lines


def test_the_finder_looks_at_no_name_of_another_package(monkeypatch):
    looked_at = []
    monkeypatch.setattr(finder, "_implementation", looked_at.append)
    for name in ("numpy.linalg", "torch", "apexes.amp", "apex.optimizers"):
        finder._Finder().find_spec(name)
    assert looked_at == ["apex.optimizers"]


def test_every_name_in_the_finder_has_an_implementation():
    code = (
        "from instep.compat import finder; finder.install(); import importlib, sys\n"
        "for name, ours in finder.IMPLEMENTATIONS.items():\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__name__ == module.__spec__.name == ours, module\n"
        "import horovod.torch as hvd\n"
        "assert hvd is sys.modules['horovod.torch'] is sys.modules['instep.compat.horovod']\n"
        "from horovod.torch.mpi_ops import Average, allreduce, rank, synchronize\n"
        "from horovod.torch.compression import Compression\n"
        "from horovod.common.process_sets import ProcessSet, global_process_set\n"
        "assert (allreduce, Compression) == (hvd.allreduce, hvd.Compression)\n"
        "assert global_process_set is hvd.global_process_set\n"
        "assert hvd.mpi_ops.Sum is hvd.Sum\n"
        "import horovod.runner\n"
        "assert horovod.run is horovod.runner.run\n"
        "assert horovod.__version__ == '0.28.1'\n"
        "assert not hasattr(horovod, 'walk')\n"
        "from horovod.common.util import gloo_built\n"
        "from horovod.runner.common.util import codec, env\n"
        "try: from horovod.runner.common.util import hosts\n"
        "except ImportError as error: print(error)\n"
        "try: import horovod.runner.elastic.discovery\n"
        "except ImportError as error: print(error)\n"
        "from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader\n"
        "try: import horovod.walk\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "for name in ('horovod.spark.torch', 'jittor.dataset.mnist', 'jittor.lr_scheduler'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    lines = [
        "horovod.runner.common.util.hosts needs an installed Horovod. In its place: the command "
        "`instep horovodrun -H host:4,...`.",
        "horovod.runner.elastic needs an installed Horovod. In its place: the command "
        "`instep horovodrun --host-discovery-script FILE`.",
        "No module named 'horovod.walk'",
        "horovod.spark needs an installed Horovod. In its place: instep.spawn, or the command "
        "`instep horovodrun` on each host.",
        "jittor.dataset.mnist needs an installed Jittor. In its place: torchvision.datasets.MNIST.",
        "jittor.lr_scheduler needs an installed Jittor. In its place: torch.optim.lr_scheduler.",
    ]
    run_fresh(prints, code, lines)
    assert "horovod.torch" in finder.IMPLEMENTATIONS
