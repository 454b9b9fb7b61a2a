"""What an unedited script hears of its launcher, and what it is left alone for."""

import os
import subprocess
import sys

import pytest
import torch

from instep.distributed.identity import accelerators, launchers
from instep.distributed.identity.world import World
from instep.launch.worker import static_opt_out
from instep.unedited import launcher_env, opt_out
from instep.unedited.opt_out import BatchEffect
from instep.unedited.processes import failure_reports
from instep.unedited.session import fix_hash_seed, print_opt_out
from test_unedited_world import FORKED, Place


@pytest.fixture
def claimed():
    reasons = []
    opt_out.set_handler(lambda reason, numbers: reasons.append(reason))
    yield reasons
    opt_out.set_handler(None)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(launcher_env, "_masked", {})
    for name in [*filter(launchers.is_launcher_variable, os.environ)]:
        monkeypatch.delenv(name)
    said = {"RANK": "1", "WORLD_SIZE": "2", launchers.STORE_FD: "9"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    return said


def test_the_launchers_variables_are_hidden_and_shown_again(launched):
    before = dict(os.environ)
    launcher_env.mask()
    assert dict(os.environ) == {k: v for k, v in before.items() if k not in launched}
    assert launcher_env._masked == launched
    launcher_env.restore()
    del before[launchers.STORE_FD]  # what it named is not there any more
    assert dict(os.environ) == before
    assert launcher_env._masked == {}


MPI_SETTINGS = {
    "OMPI_MCA_plm_rsh_agent": "",  # without ssh no process can start Open MPI 4 without it
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "PMIX_MCA_gds": "hash",
}


def test_what_a_user_sets_for_mpi_is_not_hidden(launched, monkeypatch):
    own = MPI_SETTINGS | {"OMPI_MCA_ess_singleton_isolated": "1", "OMPI_MCA_orte_tmpdir_base": "/t"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    launcher_env.mask()
    assert own.items() <= os.environ.items()
    launcher_env.restore()


def test_what_mpirun_sets_for_its_ranks_is_hidden_beside_what_a_user_sets(launched, monkeypatch):
    of_mpirun = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_MCA_ess": "^singleton",
        "OMPI_MCA_orte_hnp_uri": "551092224.0;tcp://192.0.2.2:46093",
        "OMPI_MCA_pmix": "^s1,s2,cray,isolated",
        "PMIX_NAMESPACE": "551092225",
    }
    for name, value in (of_mpirun | MPI_SETTINGS).items():
        monkeypatch.setenv(name, value)
    launcher_env.mask()
    assert MPI_SETTINGS.items() <= os.environ.items()
    assert launcher_env._masked == launched | of_mpirun
    launcher_env.restore()


def asks(seam, *args):
    """As the wrapper of a patch calls what answers."""
    return seam(*args)


def test_who_asks_politely_hears_nothing_and_who_takes_it_for_granted_is_left_alone(
    launched, claimed
):
    launcher_env.mask()
    get, contains, item = (
        getattr(type(os.environ), name) for name in ("get", "__contains__", "__getitem__")
    )
    try:
        assert opt_out.environ_get(get, os.environ, "RANK") is None
        assert opt_out.environ_get(get, os.environ, "RANK", "0") == "0"
        assert opt_out.environ_get(get, os.environ, "PATH") == os.environ["PATH"]
        assert opt_out.environ_get(get, os.environ, "NOT_SET", "else") == "else"
        assert not opt_out.environ_contains(contains, os.environ, "RANK")
        assert not opt_out.environ_contains(contains, os.environ, "NOT_SET")
        assert opt_out.environ_contains(contains, os.environ, "PATH")
        assert opt_out.environ_getitem(item, os.environ, "PATH") == os.environ["PATH"]
        assert claimed == []
        with pytest.raises(KeyError):
            opt_out.environ_getitem(item, os.environ, "RANK")
        assert claimed == ["it takes RANK for granted"]
    finally:
        launcher_env.restore()


def test_some_calls_are_made_by_distributed_scripts_only(claimed):
    claiming = opt_out.opts_out("it makes a group")
    assert claiming(max, 3, 4) == 4
    assert claiming(sorted, [1, 2], reverse=True) == [2, 1]
    assert claimed == ["it makes a group"] * 2
    opt_out.set_handler(None)
    assert claiming(max, 3, 4) == 4
    assert len(claimed) == 2


def from_module(name, seam, *args):
    """What a seam answers where code of this module calls the patched function."""
    space = {"__name__": name, "asks": asks, "seam": seam, "args": args}
    exec("answer = asks(seam, *args)", space)
    return space["answer"]


def test_the_scripts_own_process_group_is_not_initialized():
    def true(*group):
        return True, *group

    for ours in ("instep.training.replicas", "torch.distributed.nn"):
        assert from_module(ours, opt_out.is_initialized, true) == (True,)
        assert from_module(ours, opt_out.rank_or_size, true, "group") == (True, "group")
    for other in ("__main__", "torch.nn", "torch.distributedly", "insteps"):
        assert from_module(other, opt_out.is_initialized, true) is False
        with pytest.raises(ValueError, match="make sure to call init_process_group"):
            from_module(other, opt_out.rank_or_size, true)


def test_a_script_that_turns_out_to_use_instep_is_left_alone(claimed):
    assert from_module("__main__", opt_out.instep_getattr, len, "replicate") == 9
    assert from_module("__main__", opt_out.instep_getattr, len, "not_there") == 9
    assert from_module("instep.cli", opt_out.instep_getattr, len, "replicate") == 9
    assert claimed == ["it uses instep.replicate"]


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cpu", "0,1", ""), ("auto", "4,6", "6"), ("auto", "4", "4"), ("auto", "", "")],
)
def test_cuda_means_the_ranks_own_gpu(monkeypatch, device, visible, expected):
    monkeypatch.setattr(accelerators, "is_usable", lambda row: True)
    monkeypatch.setenv("INSTEP_DEVICE", device)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launcher_env.set_visible_device(World(1, 2, 1, 2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


TRAINER = """
    # Finds out how many processes there are in every way that a library of trainers does.
    import argparse, os, shutil
    import torch
    import torch.distributed as dist

    NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURM_NTASKS",
             "MV2_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}

    def signs():
        yield from (name for name in sorted(NAMES) if os.environ.get(name) is not None)
        yield from (name for name in sorted(NAMES) if name in os.environ or os.getenv(name))
        for names in (os.environ.keys(), os.environ.copy(), dict(os.environ), [*os.environ]):
            yield from NAMES & set(names)
        yield from (name for name, _ in os.environ.items() if name in NAMES)
        if dist.is_available() and dist.is_initialized() or dist.is_torchelastic_launched():
            yield "torch"
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", default=-1)
        parser.add_argument("view")
        if parser.parse_args().local_rank != -1:
            yield "local_rank"

    class Trainer:
        def __init__(self, model, data):
            self.signs = [*signs()]
            if self.signs:
                dist.init_process_group("gloo")
            self.model, self.data, self.steps, self.log = model, data, 0, []
            self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(self, epochs, folder="checkpoints"):
            best = None
            for epoch in range(epochs):
                for x, y in torch.utils.data.DataLoader(self.data, batch_size=8, shuffle=True):
                    self.optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(self.model(x), y)
                    loss.backward()
                    self.optimizer.step()
                    self.steps += 1
                self.log.append(f"{epoch}: {loss.item():.4f}")
                here = f"{folder}/{self.steps}"
                os.makedirs(f"{folder}/draft", exist_ok=True)
                torch.save(self.model.state_dict(), f"{folder}/draft/model.pt")
                os.replace(f"{folder}/draft", here)
                if epoch == 1:
                    best = here
                for old in os.listdir(folder):
                    if f"{folder}/{old}" not in (best, here):
                        shutil.rmtree(f"{folder}/{old}")
            self.model.load_state_dict(torch.load(f"{best}/model.pt"))
"""


@pytest.mark.nightly
@pytest.mark.launch
def test_a_trainer_of_a_library_trains_in_one_process_that_is_divided(tmp_path):
    place = Place(tmp_path)
    place.script(TRAINER, "trainer.py")
    script = place.script("""
        import torch
        from trainer import Trainer
        torch.manual_seed(1)
        x = torch.randn(30, 4)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        trainer = Trainer(model, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)))
        trainer.train(4)
        print(trainer.signs, trainer.steps, *trainer.log)
        print(f"{model(x).square().sum().item():.4f}")  # with each rank's own parameters
        torch.save(model.state_dict(), "last.pt")
    """)
    alone = place.run("alone", sys.executable, script)
    done = place.run("n2", *FORKED, "2", script, MV2_COMM_WORLD_SIZE="2", SLURM_NTASKS="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == alone.stdout
    assert done.stdout.startswith("[] 16 0: ")
    assert place.left("n2").keys() == place.left("alone").keys()
    ours, theirs = (torch.load(tmp_path / name / "last.pt") for name in ("n2", "alone"))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.launch
@pytest.mark.parametrize("n", [1, 2])
def test_a_script_that_requires_its_local_rank_gets_it(tmp_path, n):
    place = Place(tmp_path)
    script = place.script("""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, required=True)
        parser.add_argument("view")
        print(parser.parse_args().local_rank)
    """)
    done = place.run("run", *FORKED, str(n), script)
    assert done.returncode == 0, done.stderr
    assert [line[-1] for line in sorted(done.stdout.splitlines())] == [str(k) for k in range(n)]


@pytest.mark.launch
def test_after_divided_work_it_is_too_late_to_be_left_alone(tmp_path):
    place = Place(tmp_path)
    script = place.script("""
        import os, torch
        model = torch.nn.Linear(3, 3)
        model(torch.randn(8, 3))
        os.environ["RANK"]
    """)
    done = place.run("n2", *FORKED, "2", script)
    assert (done.returncode, done.stdout) == (1, "")
    assert "as one process so far, and now it takes RANK for granted" in done.stderr


def test_a_variable_that_another_launcher_sets_is_said_to_be_so(monkeypatch):
    monkeypatch.setattr(launcher_env, "_masked", {"RANK": "1"})
    world = World(rank=1, size=2, local_rank=1, local_size=2, source="instep run")
    notes = []
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "RANK", "a word", 3):
        error = KeyError(name)
        launcher_env.add_note(error, world)
        notes.append([note[:44] for note in getattr(error, "__notes__", [])])
    assert notes == [
        ["instep: instep run does not set SLURM_PROCID"],
        ["instep: instep run does not set OMPI_COMM_WO"],
        [],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("seed", "again"), [(None, True), ("", True), ("random", True), ("0", False), ("7", False)]
)
def test_sets_of_strings_have_one_order_on_all_ranks(monkeypatch, seed, again):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, args: started.append((path, args)))
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py", "an argument"])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    fix_hash_seed()
    assert started == ([(sys.executable, sys.orig_argv)] if again else [])
    assert os.environ["PYTHONHASHSEED"] == ("0" if again else seed)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-"])  # its text has been read already
    started.clear()
    fix_hash_seed()
    assert started == []


@pytest.mark.parametrize("option", ["-E", "-I"])
def test_python_that_ignores_the_seed_of_hashes_is_refused(option):
    starts = "import sys; sys.path[:0] = sys.argv[1:]; from instep.unedited import session; "
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = subprocess.run(
        [sys.executable, option, "-c", f"{starts}session.start()", *sys.path],
        env=os.environ | world | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "UneditedError: with its options -E and -I" in ended.stderr


class Store(dict):
    """Has what rank 0 has said; nobody ever sets another key."""

    get = dict.__getitem__

    def wait(self, keys, timeout):
        if not self.keys() >= {*keys}:
            raise torch.distributed.DistStoreError("timed out")

    def check(self, keys):
        return self.keys() >= {*keys}


@pytest.mark.parametrize(("said", "reports"), [(b"lost", False), (b"other", True), (None, True)])
def test_a_failure_of_all_ranks_is_reported_once(said, reports):
    store = Store({} if said is None else {failure_reports._FAILED: said})
    failures = failure_reports.FailureReports(store, World(1, 2, 1, 2))
    assert failures.is_to_report("lost") is reports
    assert failures.is_to_report("lost"), "one that follows is another one"


@pytest.mark.parametrize("own_group", ["", "torch.distributed.init_process_group()\n"])
def test_a_script_that_calls_shard_is_told_that_its_batches_are_divided(
    tmp_path, monkeypatch, capsys, own_group
):
    monkeypatch.chdir(tmp_path)
    script = f"import instep, torch\n{own_group}train(instep.shard(loader))\n"
    (tmp_path / "toy.py").write_text(script)
    reason = static_opt_out.find_opt_out(["toy.py"])
    print_opt_out(World(size=2, local_size=2), reason, static_opt_out.batch_effect(reason))
    assert capsys.readouterr().err == (
        "instep: toy.py calls instep itself: each rank runs it as written, and instep.shard "
        "divides the batches. [INS714]\n"
    )


def test_a_script_that_forgets_shard_is_told_that_its_runs_may_be_identical(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import instep\nmodel = instep.replicate(model)\n")
    reason = static_opt_out.find_opt_out(["train.py"])
    assert reason == "train.py uses instep itself"
    assert static_opt_out.batch_effect(reason) is BatchEffect.UNSHARDED


def test_a_script_that_uses_horovod_is_told_what_its_batch_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\n")
    reason = static_opt_out.find_opt_out(["train.py"])
    assert reason == "train.py uses horovod itself"
    assert static_opt_out.batch_effect(reason) is BatchEffect.UNKNOWN
