"""Unedited scripts on several ranks look like one process from the outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import detour
import forked_jobs
import instep
from instep.distributed.identity import accelerators, torch_devices
from instep.distributed.identity.world import World
from instep.errors import DeviceError
from instep.launch.worker import static_opt_out
from instep.process.patching import Patch, PatchHandle
from instep.process.torch_private.dispatch import script_operations
from instep.unedited import devices, launcher_env, patch_table
from instep.unedited.objects.syntax_trees import compares_types

RUN = (sys.executable, "-m", "instep", "run", "-n")
FORKED = ("forked instep", "run", "-n")
"""The same without the import of torch in each rank (forked_jobs.py)."""
VIEW = """\
import json, sys
def view(value):
    \"\"\"What this rank sees, for the test.\"\"\"
    session = sys.modules.get("instep.unedited.session")
    if session is None or session.current() is None:
        return
    from instep.unedited.files.bypass import bypass_overlay
    with bypass_overlay(), open(f"{sys.argv[1]}/{session.current().world.rank}.json", "w") as file:
        json.dump(value, file)
"""


class Place:
    """A folder for scripts, and one for each run of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "view.py").write_text(VIEW)

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def run(
        self, name: str, *command: str, text: str = "", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it in the folder `name`; nothing temporary may be left but what torch leaves."""
        for made in (name, f"{name}-views"):
            (self.folder / made).mkdir(exist_ok=True)
        temporary = tempfile.mkdtemp(dir="/tmp")  # a socket's path may have 107 letters
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("INSTEP", "PYTHONHASH"))}
        words = [*command, str(self.folder / f"{name}-views")]
        told = clean | {"TMPDIR": temporary, "INSTEP_DIVIDE": "always"} | environ
        where = self.folder / name
        if command[: len(FORKED)] == FORKED:
            done = forked_jobs.run(*words[1:], input=text, cwd=where, env=told)
        else:
            done = subprocess.run(
                words, input=text, capture_output=True, text=True, timeout=100, cwd=where, env=told
            )
        left = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]
        assert left == []
        shutil.rmtree(temporary)
        return done

    def views(self, name: str) -> list[Any]:
        paths = sorted((self.folder / f"{name}-views").iterdir())
        return [json.loads(path.read_text()) for path in paths]

    def left(self, name: str) -> dict[str, bytes | None]:
        folder = self.folder / name
        return {
            str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in folder.rglob("*")
        }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


OUTSIDE = """
    import logging, multiprocessing, os, random, shutil, subprocess, sys, tarfile, warnings
    import numpy, torch, torch.distributed, tqdm
    from view import view

    SEEN = []
    def say(*words):
        SEEN.append(repr(words))
        print(*words)

    def main():
        say([os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")])
        say("RANK" in os.environ, torch.distributed.is_initialized())
        say(subprocess.run(["sh", "-c", "echo ${RANK-none}"], stdout=subprocess.PIPE).stdout)
        SEEN.append(repr((random.random(), numpy.random.rand(), torch.rand(1), set("abcdefgh"))))

        # standard input and the terminal
        say(input("name? "), sys.stdin.readline(), os.isatty(0), sys.stdout.isatty())
        say(shutil.get_terminal_size())

        # what is on disk
        runs = int(open("runs.txt").read()) if os.path.exists("runs.txt") else 0
        open("runs.txt", "w").write(str(runs + 1))
        number = 0
        while os.path.exists(f"experiment{number}"):
            number += 1
        os.makedirs(f"experiment{number}/logs")
        say(runs, number)
        torch.manual_seed(1)
        torch.save(torch.rand(3), "best.pt")
        say(torch.load("best.pt"))
        with tarfile.open("data.tar", "w") as archive:
            archive.add("runs.txt")
        with tarfile.open("data.tar") as archive:
            archive.extractall("data", filter="data")
        say(open("data/runs.txt").read(), sorted(os.listdir()))
        shutil.rmtree("data")
        os.remove("data.tar")
        with open("log.txt", "a") as file:
            file.write("one line\\n")
        os.symlink(f"experiment{number}", "latest")
        open("latest/logs/events", "w").write("x")

        # what is heard
        os.system("echo from a child; echo one >> children.txt")
        say(os.popen("echo read; cat children.txt").read())
        print("to stderr", file=sys.stderr)
        for _ in tqdm.trange(3, bar_format="{n_fmt}/{total_fmt}"):
            pass
        warnings.warn("be warned")
        logging.warning("be logged")
        child = os.fork()
        if not child:
            print("forked", flush=True)
            os._exit(3)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for way in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(
                range(6), 2, num_workers=1, multiprocessing_context=way
            )
            say([batch.tolist() for batch in loader])
        view(SEEN)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.launch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_from_the_outside_it_is_one_process(place: Place, n: int) -> None:
    script = place.script(OUTSIDE)
    text = "Ada\nand more\n"
    plain = place.run("plain", sys.executable, script, text=text, PYTHONHASHSEED="0")
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.count("from a child") == plain.stdout.count("forked") == 1
    done = place.run("many", *FORKED, str(n), script, text=text)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert done.stderr.splitlines() == plain.stderr.splitlines()
    assert place.left("many") == place.left("plain")
    views = place.views("many")
    assert len(views) == n
    assert views == views[:1] * n


DISTRIBUTED = """
    import os, sys
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # later its default arguments would keep the group past the end

    politely = os.environ.get("RANK"), "WORLD_SIZE" in os.environ, dist.is_initialized()
    rank = int(os.environ["RANK"])
    if dist.is_available():
        dist.init_process_group("gloo")
    seen = torch.full((), rank + 1.0)
    dist.all_reduce(seen)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with open(f"rank{rank}", "w") as file:
        file.write(f"{politely} {seen.item()} {dist.get_world_size()}")
    del model  # so would torch's DDP, and the group's threads may abort a process that ends
    dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.launch
def test_a_script_with_a_process_group_of_its_own_is_left_alone(place: Place) -> None:
    done = place.run("n2", *RUN, "2", place.script(DISTRIBUTED))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        "instep: every rank runs this script as it is, since it takes RANK for granted. If each "
        "rank takes batches of one process's size from a part of the data, the batch is 2 times "
        "larger, with 1/2 of the steps; if each takes all data, these are 2 identical runs. "
        "[INS714]\n"
    )
    seen = b"(None, False, False) 3.0 2"
    assert place.left("n2") == {"rank0": seen, "rank1": seen}


@pytest.mark.launch
def test_where_that_is_certain_it_is_left_alone_from_the_beginning(place: Place) -> None:
    certain = DISTRIBUTED.replace("if dist.is_available():", "with torch.enable_grad():")
    done = place.run("n2", *FORKED, "2", place.script(certain))
    assert (done.returncode, done.stdout) == (0, "")
    assert "it is, since it starts a process group of its own. If each rank takes" in done.stderr
    assert place.left("n2") == {
        "rank0": b"('0', True, False) 3.0 2", "rank1": b"('1', True, False) 3.0 2"
    }  # fmt: skip


@pytest.mark.launch
def test_explicit_calls_are_found_by_reading_and_plain_is_plain(place: Place) -> None:
    place.script("import instep\ndef version(): return instep.__version__", "mine.py")
    script = place.script("""
        import os, sys, mine
        assert "torch" not in sys.modules
        with open(f"rank{os.environ['RANK']}", "w") as file:
            file.write(mine.version())
    """)
    done = place.run("n2", *RUN, "2", script)
    assert (done.returncode, done.stderr) == (0, (
        "instep: every rank runs this script as it is, since ../mine.py uses instep itself. It "
        "does not call instep.shard: if it does not divide its data otherwise, each of the 2 "
        "ranks computes all of it. [INS714]\n"
    ))  # fmt: skip
    assert place.left("n2") == dict.fromkeys(("rank0", "rank1"), instep.__version__.encode())
    script = place.script("import os; open(os.environ['RANK'], 'w')", "plain.py")
    done = place.run("plain", *RUN[:-1], "--plain", "-n", "2", script)
    assert (done.returncode, done.stderr, place.left("plain")) == (0, "", {"0": b"", "1": b""})


WANDB = """
import subprocess

def init(mode=None):
    if mode != "disabled":
        subprocess.run("echo git >> logged", shell=True)
"""


@pytest.mark.nightly
@pytest.mark.launch
def test_a_checkpoint_of_torch_distributed_a_trace_and_a_logger_are_those_of_one_process(
    place: Place,
) -> None:
    """What the logger starts on rank 0 is nothing that the others wait for."""
    place.script(WANDB, "wandb.py")
    script = place.script("""
        import os, subprocess, torch, wandb
        import torch.distributed.checkpoint as dcp
        wandb.init()
        subprocess.run("echo mine >> asked", shell=True)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id="saved", no_dist=True)
        dcp.save(state, checkpoint_id="found")
        before = model[0].weight.clone()
        torch.nn.init.zeros_(model[0].weight)
        dcp.load(state, checkpoint_id="found")
        print(torch.equal(before, model[0].weight), os.listdir("saved") == os.listdir("found"))
        torch.jit.trace(model, torch.randn(4, 8))
    """)
    done = place.run("n2", *RUN, "2", script, PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")
    kept = place.left("n2")
    assert (kept["logged"], kept["asked"]) == (b"git\n", b"mine\n")
    assert {name for name in kept if name.startswith("found/")} == {
        "found/.metadata",
        "found/__0_0.distcp",
    }


@pytest.mark.launch
def test_what_the_ranks_disagree_about_is_told(place: Place) -> None:
    script = place.script("""
        import os, torch
        from torch.utils.data import DataLoader, Dataset
        class Rows(Dataset):
            __len__ = lambda self: 16
            __getitem__ = lambda self, k: torch.tensor(k)
        torch.default_generator.manual_seed(os.getpid())
        list(DataLoader(Rows(), 4, shuffle=True))
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert done.returncode == 1
    assert done.stderr.count("the ranks disagree about the samples of the next batch") == 1
    assert "list(DataLoader(Rows(), 4, shuffle=True))" in done.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        pytest.param("sys.exit('no data')", 1, "no data", marks=pytest.mark.nightly),
        pytest.param(
            "torch.multiprocessing.spawn(print, nprocs=2)",
            1,
            "Run it with one rank",
            marks=pytest.mark.nightly,
        ),
        ("fails_on_rank_1()", 1, "OSError: only here"),
        (r"raise ValueError('no \udcff')", 1, r"ValueError: no \udcff"),
    ],
)
def test_the_end_of_a_script_is_told_once(place: Place, ending: str, code: int, last: str) -> None:
    script = place.script(f"""
        import atexit, sys, torch
        def fails_on_rank_1():
            from instep.unedited import session
            if session.current().world.rank == 1:
                raise OSError("only here")
        {ending}
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count(last) == done.stderr.count("instep: rank") == 1
    assert done.stderr.startswith(f"instep: rank {int('rank_1' in ending)} of 2 ")


@pytest.mark.launch
def test_what_an_object_prints_when_python_deletes_it_at_its_end_is_printed_once(
    place: Place,
) -> None:
    script = place.script("""
        import sys, torch
        class Environment:
            def __init__(self):
                self.out, self.err = sys.stdout, sys.stderr
            def __del__(self):
                print("closed", file=self.out, flush=True)
                print("closed", file=self.err, flush=True)
        kept = Environment()
        torch.nn.Linear(3, 2)(torch.ones(4, 3))
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert (done.returncode, done.stdout) == (0, "closed\n")
    assert done.stderr.count("closed") == 1


@pytest.mark.launch
def test_a_rank_that_waits_in_vain_ends_whatever_the_name_of_the_script(place: Place) -> None:
    text = """
        import torch
        model, x = torch.nn.Linear(4, 1), torch.ones(4, 4)
        model(x).sum().backward()
        from instep.unedited import session
        if session.current().world.rank == 0:
            model(x).sum().backward()
    """
    done = place.run("n2", *FORKED, "2", place.script(text, os.fsdecode(b"\xff.py")))
    assert done.returncode == 1
    assert re.search(r"rank 0 waits in forward at .*\\udcff\.py:7\n", done.stderr)


@pytest.mark.launch
def test_an_exit_code_of_which_the_system_keeps_0_is_no_failure(place: Place) -> None:
    done = place.run("n2", *FORKED, "2", place.script("import sys, torch\nsys.exit(256)\n"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.launch
def test_a_script_may_end_its_process_itself(place: Place) -> None:
    """Rank 1 still asks for what rank 0 has read when rank 0 is about to end."""
    script = place.script("""
        import os, sys, torch
        from instep.unedited import session
        from instep.unedited.files.bypass import bypass_overlay
        read_by_rank_0 = f"{sys.argv[1]}/read"
        with bypass_overlay():
            while session.current().world.rank == 1 and not os.path.exists(read_by_rank_0):
                pass
            line = input()
            open(read_by_rank_0, "w").close()
        print(len(line), flush=True)
        os._exit(0)
    """)
    done = place.run("n2", *FORKED, "2", script, text="a line\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


@pytest.mark.launch
def test_a_script_that_becomes_another_program_does_so_once(place: Place) -> None:
    script = place.script("""
        import os, sys
        if "AGAIN" not in os.environ:
            import torch
            print(torch.rand(2).mean().item() > 0, flush=True)
            os.environ["AGAIN"] = "1"
            os.execl(sys.executable, sys.executable, *sys.argv)
        print("again", flush=True)
        with open("runs.txt", "a") as file:
            file.write("x")
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert (done.returncode, done.stdout) == (0, "True\nagain\n"), done.stderr
    assert done.stderr.count("since the script becomes another program") == 1
    assert place.left("n2") == {"runs.txt": b"x"}


@pytest.mark.launch
def test_a_rank_that_ends_before_another_one_is_named(place: Place) -> None:
    """As where each of them looks at the clock for when to end."""
    script = place.script("""
        import torch
        from instep.unedited import session
        model, x = torch.nn.Linear(3, 3), torch.randn(8, 3)
        for step in range(3 + session.current().world.rank):
            model(x)
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert (done.returncode, done.stdout) == (1, "")
    title, ended, waiting = done.stderr.splitlines()[:3]
    assert title == "instep: the ranks wait for each other in different collectives:"
    assert ended.startswith("  rank 0 waits in exit at the end of the script, after ")
    assert ended.endswith(f" at {script}:6")
    assert waiting == f"  rank 1 waits in forward at {script}:6"


@pytest.mark.launch
@pytest.mark.nightly
def test_no_depth_of_calls_asks_the_system_for_memory_again_and_again(place: Place) -> None:
    """As where the frames of calls go beyond a chunk of the interpreter's, which is then new."""
    script = place.script("""
        import resource, torch
        def deep(depth):
            if depth:
                deep(depth - 1)
            else:
                for _ in range(300):
                    leaf(*range(60))
        def leaf(*numbers):
            return max(numbers)
        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for depth in range(400):  # once, so that the pages are there
            deep(depth)
        before = faults()
        for depth in range(400):
            deep(depth)
        print(faults() - before < 150, torch.ones(1).item())
    """)
    done = place.run("n2", *RUN, "2", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 1.0\n", "")


@pytest.mark.launch
@pytest.mark.nightly
def test_a_divided_call_imports_no_symbolic_shapes(place: Place) -> None:
    """They take a third of a second."""
    script = place.script("""
        import sys, torch
        from instep.unedited.sharded_call.counting import call_counts
        model = torch.nn.Linear(3, 3)
        model(torch.ones(4, 3)).sum().backward()
        print(call_counts.sharded, "sympy" in sys.modules)
    """)
    done = place.run("n2", *RUN, "2", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 False\n", "")


UNSEEDED = """
    import os, random, secrets, sys, time, uuid
    import numpy, torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset
    from view import view

    class Drawn(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return numpy.random.default_rng().random()

    class Stream(IterableDataset):
        def __iter__(self):
            generator = numpy.random.default_rng()
            return iter([generator.random(), generator.random()])

    if __name__ == "__main__":
        random.seed(), numpy.random.seed(), torch.seed()
        seen = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        generators = numpy.random.default_rng(), numpy.random.RandomState(), random.Random()
        seen += [generators[0].random(), generators[1].rand(), generators[2].random()]
        for data in (Drawn(), Stream()):
            for workers in (0, 2):
                seen += [batch.tolist() for batch in DataLoader(data, 8, num_workers=workers)]
        print(seen)
        seen += [os.urandom(4).hex(), str(uuid.uuid4()), secrets.token_hex(4)]
        random.seed(time.time_ns()), numpy.random.seed(seed=os.getpid())
        torch.manual_seed(os.getpid())
        seen += [random.random(), numpy.random.rand(), torch.rand(()).item()]
        made = random.Random(os.getpid()), numpy.random.default_rng(os.getpid())
        seen += [each.random() for each in made]
        view(seen)
"""


@pytest.mark.launch
def test_generators_that_nobody_seeds_are_the_same_on_any_number_of_ranks(place: Place) -> None:
    script = place.script(UNSEEDED)
    one, two = (place.run(f"n{n}", *FORKED, str(n), script, INSTEP_SEED="4") for n in (1, 2))
    assert (one.returncode, one.stderr) == (0, "")
    assert two.stderr.startswith("instep: Drawn draws random numbers in its samples.")
    assert one.stdout == two.stdout
    first, second = place.views("n2")
    assert first == second
    assert len({str(seen) for seen in first}) == len(first)


@pytest.mark.parametrize(
    ("early", "seed", "drawn"),
    [
        ("numpy", 4, ["0.31896214069752826", "0.5628507549625561"]),
        ("json", 4, ["0.31896214069752826", "0.5628507549625561"]),
        ("json", 5, ["0.6556996727928951", "0.9987532674457328"]),
    ],
)
def test_seeds_do_not_depend_on_what_was_imported_before(
    early: str, seed: int, drawn: list[str]
) -> None:
    """numpy asks for bits while it is imported."""
    code = f"""
        import {early}
        from instep.process.patching import PatchHandle
        from instep.unedited import seeds
        seeds.seed_everything({seed})
        PatchHandle(seeds.SEED_PATCHES)
        import numpy
        print(numpy.random.default_rng().random(), numpy.random.default_rng().random())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == drawn


def test_a_rank_that_imports_numpy_for_its_own_work_draws_nothing_from_pythons_generator() -> None:
    """As where the first sample of a loader is loaded, which draws from it."""
    code = """
        import random
        from instep.distributed.communication.rank_local import rank_local
        from instep.process.patching import PatchHandle
        from instep.unedited import seeds
        seeds.seed_everything(3)
        PatchHandle(seeds.SEED_PATCHES)
        before = random.getstate()
        with rank_local():
            import numpy.random
        print(random.getstate() == before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


UNDER_MPI = """
    import instep.auto
    import os, random, sys
    from view import view

    view([[*{"a", "bb", "ccc", "dddd"}], random.random(), os.environ.get("OMPI_COMM_WORLD_RANK")])
    print(sys.stdin.read())
    open("once", "a").write("x")
    raise KeyError("all alike")
"""


@pytest.mark.launch
def test_importing_instep_auto_does_the_same_under_mpirun(place: Place) -> None:
    mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    done = place.run("mpi", *mpirun, sys.executable, place.script(UNDER_MPI), text="input")
    assert done.returncode == 1
    assert (done.stdout.strip(), done.stderr.count("KeyError: 'all alike'")) == ("input", 1)
    first, second = place.views("mpi")
    assert first == second
    assert first[2] is None
    assert place.left("mpi") == {"once": b"x"}


DETOUR = """
import torch
from detour import Detour

torch.manual_seed(3)
model = Detour().double()
for step in range(5):
    x = torch.randn(12, 4).double()
    if step > 2:  # the first calls have proven that it can be divided
        x[1, 0] = 1000  # a row of rank 0's
    model(x).square().mean().backward()
print(*(f"{parameter.grad.norm():.9f}" for parameter in model.parameters()))
"""


@pytest.mark.launch
@pytest.mark.nightly
def test_a_layer_that_only_some_ranks_use_between_batch_normalisations(place: Place) -> None:
    shutil.copy(detour.__file__, place.folder)
    script = place.script(DETOUR)
    wire = {"INSTEP_BACKEND": "gloo", "INSTEP_BUCKET_MIB": "0"}  # a bucket for each parameter
    two = place.run("two", *RUN, "2", script, **wire)
    assert two.returncode == 0, two.stderr
    assert two.stdout == place.run("one", *RUN, "1", script).stdout


TYPES = """
import torch
from torch import nn

model = nn.Linear(64, 600).double()
x = torch.ones(300, 64, dtype=torch.double)  # the output is large: its rows may stay on their ranks
for _ in range(3):
    y = model(x)
    print(y.__class__ is torch.Tensor, type(y), CONDITION)
"""


@pytest.mark.launch
@pytest.mark.parametrize("condition", ["type(y) is torch.Tensor", "0"])
def test_a_large_output_has_the_type_that_a_script_asks_for(place: Place, condition: str) -> None:
    script = place.script(TYPES.replace("CONDITION", condition))
    two = place.run("two", *FORKED, "2", script)
    assert two.returncode == 0, two.stderr
    assert two.stdout == f"True <class 'torch.Tensor'> {'0' if condition == '0' else True}\n" * 3


# ------------------------------------------------------------------------------------- pure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("type(y) is torch.Tensor", True),
        ("type(y) not in (Tensor, Parameter)", True),
        ("type(a) == type(b)", True),
        ("kind = type(y)", True),
        ("HANDLERS[type(y)](y)", True),
        ("HANDLERS.get(type(y), print)(y)", True),
        ("type(y) in (list, tuple)", False),
        ("type(y) is type(None)", False),
        ("type(self) is not type(other)", False),
        ("type(y).__name__ == 'Tensor' and isinstance(y, torch.Tensor)", False),
    ],
)
def test_reading_finds_comparisons_of_types(place: Place, text: str, expected: bool) -> None:
    assert compares_types(place.script(text)) == expected


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, ["nvidia0", "nvidia1"], ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, ["nvidia0"], ["3", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-abc"}, [], ["GPU-abc"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], []),
    ],
)
def test_visible_devices(environ: dict[str, str], files: list[str], expected: list[str]) -> None:
    assert (
        accelerators.visible_devices(accelerators.row_of("cuda"), environ, len(files)) == expected
    )


def test_each_rank_of_a_host_has_a_device_of_its_own() -> None:
    world = World(rank=5, size=8, local_rank=1, local_size=4, node_rank=1, nodes=2)
    npu = accelerators.row_of("npu")
    assert launcher_env.own_device(["2", "4", "6", "7"], world, npu) == "4"
    assert launcher_env.own_device(["0"], world, npu) is None  # the launcher has given it one
    assert launcher_env.own_device([], world, npu) is None
    assert launcher_env.own_device(["0", "1"], World(), npu) is None  # one process has them all
    told = "4 ranks on this host, but only 3 NPUs visible.*ASCEND_RT_VISIBLE_DEVICES"
    with pytest.raises(DeviceError, match=told):
        launcher_env.own_device(["0", "1", "2"], world, npu)


@pytest.mark.parametrize(
    ("named", "own"),
    [
        ([0, 1, 2, 3], [0]),
        ([2, 3], [0]),
        ((torch.device("cuda", 1), "cuda:2"), [torch.device("cuda", 0)]),
        (3, 0),
        (-1, -1),
        ("cuda:1", torch.device("cuda", 0)),
        ("cpu", "cpu"),
        (torch.device("cpu"), torch.device("cpu")),
        (None, None),
    ],
)
def test_a_script_that_names_several_devices_gets_the_ranks_own(named: Any, own: Any) -> None:
    assert devices.replace_devices(named, "cuda") == own


def test_only_what_is_a_device_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(module: int, device_ids: Any = None, output_device: Any = None) -> Any:
        return module, device_ids, output_device

    answer = devices.use_own_device("device_ids", "output_device")
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: None)
    assert answer(parallel, 3, [1, 2], output_device=2) == (3, [1, 2], 2)
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: "cuda")
    assert answer(parallel, 3, [1, 2], output_device=2) == (3, [0], 0)
    assert answer(parallel, 3) == (3, None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_data_parallel_over_more_devices_than_a_rank_sees() -> None:
    model, x = torch.nn.Linear(3, 2).cuda(), torch.randn(5, 3).cuda()
    many = [*range(torch.cuda.device_count() + 3)]
    expected = model(x)
    patched = PatchHandle(devices.DEVICE_PATCHES)
    try:
        parallel = torch.nn.DataParallel(model, many, output_device=many[-1])
        assert parallel.device_ids == [0]
        assert torch.equal(parallel(x), expected)
        parts = torch.nn.parallel.scatter(x, many)
        outputs = torch.nn.parallel.parallel_apply(
            torch.nn.parallel.replicate(model, many), [(part,) for part in parts], devices=many
        )
        assert torch.equal(torch.nn.parallel.gather(outputs, many[-1]), expected)
    finally:
        patched.remove()


@pytest.mark.parametrize(
    ("text", "explicit"),
    [
        ("import torch", False),
        ("import instep.auto", False),
        ("from instep import auto", False),
        ("import torch, instep as i", True),
        ("from instep import replicate", True),
        ("def f():\n    from instep.training.shards import shard", True),
        ("# import instep", False),
        ("import beside", True),
        ("from folder import inner", True),
        ("import folder.inner", True),
        ("from .beside import x", True),
        ("from . import beside", True),
        ("import plain", False),
        ("this is no python", False),
    ],
)
def test_reading_finds_explicit_calls(place: Place, text: str, explicit: bool) -> None:
    for name in ("beside.py", "folder/inner.py"):
        place.script("import instep", name)
    place.script("from train import plain", "plain.py")
    assert (static_opt_out.find_opt_out([place.script(text)]) is not None) is explicit


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ("dist.init_process_group('gloo')", True),
        ("group = init_process_group(backend='gloo')", True),
        ("# dist.init_process_group('gloo')", False),
        ("if distributed: dist.init_process_group()", False),
        ("def main(): dist.init_process_group()\nif __name__ == '__main__':\n    main()", True),
        ("def main(): dist.init_process_group()\nsys.exit(main())", True),
        ("def main(): setup()\ndef setup(): dist.init_process_group()\nmain()", True),
        ("def main(): main(); dist.init_process_group()\nmain()", True),
        ("def main():\n  if one: return\n  dist.init_process_group()\nmain()", False),
        ("def main():\n  with x:\n    return\n  dist.init_process_group()\nmain()", False),
        ("def one():\n  if x: return\none()\ndist.init_process_group()", True),
        ("if one: sys.exit()\ndist.init_process_group()", False),
        ("def one():\n  if x: sys.exit()\none()\ndist.init_process_group()", False),
        ("sys.exit()\ndist.init_process_group()", False),
        ("try:\n  dist.init_process_group()\nexcept RuntimeError: pass", False),
        ("try:\n  dist.init_process_group()\nfinally: pass", True),
        ("with lock:\n  dist.init_process_group()", True),
        ("for each in x:\n  dist.init_process_group()", False),
        ("mp.spawn(main)\ndef main(): dist.init_process_group()", False),
        ("x and dist.init_process_group()", False),
    ],
)
def test_reading_finds_a_process_group_that_is_certain(
    place: Place, text: str, certain: bool
) -> None:
    assert (static_opt_out.find_opt_out([place.script(text)]) is not None) is certain


def test_patches_are_undone_exactly() -> None:
    class Base:
        def inherited(self) -> str:
            return "base"

    class Owner(Base):
        @staticmethod
        def static(word: str) -> str:
            return word

    before = dict(vars(Owner))
    twice = [
        Patch(Owner, "inherited", lambda original, self: original(self) + "!", "a test"),
        Patch(Owner, "static", lambda original, word: original(word) * 2, "a test"),
        Patch(Owner, "static", lambda original, word: original(word) + "?", "a test"),
        Patch(Owner, "absent", print, "a test"),
    ]
    patched = PatchHandle(twice)
    assert (Owner().inherited(), Owner.static("a"), Owner().static("b")) == ("base!", "aa?", "bb?")
    patched.remove()
    patched.remove()
    assert dict(vars(Owner)) == before


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_of_torch_may_name_a_function_of_torch_that_is_replaced() -> None:
    def grows(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    known = dict(script_operations)
    with PatchHandle([Patch(torch, "exp", lambda original, x: original(x))]):
        assert torch.jit.script(grows)(torch.zeros(1)) == 1
    assert script_operations == known


def test_a_patch_waits_for_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("def answer(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    patched = PatchHandle([Patch("imported_later", "answer", lambda original: original() + 1, "")])
    import imported_later

    assert imported_later.answer() == 2
    assert imported_later.__spec__.loader is imported_later.__loader__
    assert type(imported_later.__loader__).__name__ == "SourceFileLoader"
    patched.remove()
    assert imported_later.answer() == 1
    assert sys.meta_path == finders


def test_every_row_of_the_table_says_why_and_stands_once() -> None:
    rows = [(patch.owner, patch.name) for patch in patch_table.PATCHES]
    assert len({(id(o) if not isinstance(o, str) else o, name) for o, name in rows}) == len(rows)
    assert all(patch.reason for patch in patch_table.PATCHES)


@pytest.mark.launch
def test_a_module_without_a_call_that_can_be_seen_is_told_so(place: Place) -> None:
    """It is one of a package, with relative imports."""
    place.script("NAME = 'relative'", "n2/package/names.py")
    place.script(
        """
        import torch
        from .names import NAME
        weight = torch.ones(3, requires_grad=True)
        (weight * torch.arange(6.0).view(2, 3)).sum().backward()
        print(NAME, weight.grad.tolist())
        """,
        "n2/package/train.py",
    )
    done = place.run("n2", *FORKED, "2", "-m", "package.train")
    assert (done.returncode, done.stdout) == (0, "relative [3.0, 5.0, 7.0]\n")
    assert done.stderr.startswith("instep: every rank computed all of this script: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.launch
def test_of_a_model_that_only_threads_call_it_is_told_that_these_are_not_seen(place: Place) -> None:
    script = place.script("""
        import torch
        from concurrent.futures import ThreadPoolExecutor
        def train(size):
            model, x = torch.nn.Linear(size, 1), torch.ones(6, size)
            model(x).sum().backward()
            return model.weight.grad.tolist()
        with ThreadPoolExecutor(2) as threads:
            print(*threads.map(train, (1, 2)))
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert (done.returncode, done.stdout) == (0, "[[6.0]] [[6.0, 6.0]]\n")
    assert " in threads that the script starts, " in done.stderr
