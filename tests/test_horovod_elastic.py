"""hvd.elastic: states and samplers, and jobs whose ranks end and join while they train."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import instep.compat.horovod as hvd
from horovod_ranks import initialized
from instep.compat.horovod import driver_client
from instep.compat.horovod.errors import HostsUpdatedInterrupt
from instep.errors import CommandLineError
from instep.launch.elastic import flags as elastic_flags
from instep.launch.elastic.hosts import ATTEMPTS, HostTable, run_script
from instep.launch.elastic.worlds import plan_slots
from launching import Launch
from pool import ranks

HERE, THERE = "localhost", "127.0.0.1"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, ("horovodrun",))
    launch.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")  # torch leaves it
    yield launch
    launch.close()


# ------------------------------------------------------------------------------- in one world


@ranks(1, 2)
def test_a_state_is_taken_over_from_rank_0_committed_and_restored():
    with initialized():
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, float(hvd.rank() + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank(), momentum=0.9)
        state = hvd.elastic.TorchState(model, optimizer, epoch=5 + hvd.rank(), losses=[])
        state.sync()
        assert (state.epoch, state.model, model.weight.tolist()) == (5, model, [[1, 1], [1, 1]])
        assert optimizer.param_groups[0]["lr"] == 0.1
        state.losses.append(1.0)
        state.commit()
        state.epoch = 6
        state.losses.append(2.0)
        torch.nn.init.zeros_(model.weight)
        state.restore()
        assert (state.epoch, state.losses, model.weight.tolist()) == (5, [1.0], [[1, 1], [1, 1]])


@ranks(1)
def test_a_replaced_model_is_saved_and_any_object_with_a_state_dict_is_restored():
    with initialized():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), optimizer, scheduler=scheduler)
        other = torch.nn.Linear(1, 1)
        state.model = other
        before = other.weight.item()
        torch.nn.init.zeros_(other.weight)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
        state.restore()
        assert other.weight.item() == before
        assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_a_state_may_be_restored_twice_from_one_commit():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])

    def step() -> None:
        weight.grad = torch.ones(2)
        optimizer.step()

    step()
    state = hvd.elastic.TorchState(optimizer=optimizer)
    committed = optimizer.state[weight]["exp_avg"].clone()
    for _ in range(2):  # the ranks fail, and fail again before the next commit
        step()
        state.restore()
        assert torch.equal(optimizer.state[weight]["exp_avg"], committed)
        assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("changes", [(2, 1), (1, 2), (3,), (2,), (1,)])
def test_only_where_ranks_have_gone_and_none_came_nothing_is_taken_over(monkeypatch, changes):
    """1: ranks have gone; 2: some have come. A rank that has come has no state yet."""
    monkeypatch.setenv(driver_client.ELASTIC_FD, "0")
    state = hvd.elastic.ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0)
    for time, change in enumerate(changes, 10):
        state.on_hosts_updated(time, change)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync == (changes == (1,))
    state.check_host_updates()  # told once


@ranks(1, 2, 3)
def test_a_sampler_divides_what_is_left_of_an_epoch():
    with initialized():
        sampler = hvd.elastic.ElasticSampler(list(range(20)), seed=3)
        seen = [i for part in hvd.allgather_object(list(sampler)) for i in part]
        assert {*seen} == {*range(20)}
        assert len(seen) == hvd.size() * len(sampler)
        order = sampler.remaining_indices
        sampler.record_batch(0, 2)
        assert sampler.processed_num == 2 * hvd.size()
        sampler.load_state_dict(sampler.state_dict())
        assert sampler.remaining_indices == order[2 * hvd.size() :]
        sampler.set_epoch(1)
        assert (len(sampler.remaining_indices), sampler.processed_num) == (20, 0)
        assert sampler.remaining_indices != order


def test_fewer_samples_than_half_of_the_ranks_are_enough_for_a_sampler():
    sampler = object.__new__(hvd.elastic.ElasticSampler)
    sampler.remaining_indices, sampler.total_size = [7], 3
    sampler.rank, sampler.num_replicas = 2, 3
    sampler.num_samples = 1
    assert list(sampler) == [7]


def test_horovods_modules_have_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.compat import finder

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    finder.install()
    import horovod
    from horovod.common.elastic import ObjectState, State, run_fn
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.torch.elastic import TorchState, init, shutdown
    from horovod.torch.elastic.sampler import ElasticSampler

    assert issubclass(TorchState, ObjectState)
    assert issubclass(ObjectState, State)
    assert ElasticSampler is hvd.elastic.ElasticSampler
    assert HorovodInternalError is hvd.HorovodInternalError
    assert (init, shutdown, run_fn) == (hvd.init, hvd.shutdown, hvd.elastic.run_fn)
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync
    with pytest.raises(AttributeError, match="module 'horovod' has no attribute 'spam'"):
        _ = horovod.spam
    with pytest.raises(ImportError, match=r"Horovod's StateHandler .* place: TorchState, wh"):
        from horovod.torch.elastic.state import StateHandler  # noqa: F401
    with pytest.raises(ImportError, match=r"In its place: state\.check_host_updates\(\)"):
        _ = hvd.elastic.notification_manager
    assert not hasattr(hvd.elastic, "spam")


# --------------------------------------------------------------------------- hosts and worlds


@pytest.mark.parametrize(("flags", "seconds"), [((), 7.0), (("--elastic-timeout", "9"), 9.0)])
def test_horovods_variable_sets_how_long_a_job_waits_unless_the_flag_does(
    flags: tuple[str, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "7")
    parser = argparse.ArgumentParser()
    elastic_flags.add_flags(parser)
    assert elastic_flags.parse(parser.parse_args(flags), 2).timeout == seconds


def test_a_failure_excludes_its_host_or_its_slot_or_nothing() -> None:
    table = HostTable(least=2)
    table.update({HERE: 2, THERE: 2})
    assert table.exclude((HERE, 1), 0.0)
    assert table.slots(0.0) == [(THERE, 0), (THERE, 1)]
    tries = [table.exclude((THERE, 0), 0.0) for _ in range(ATTEMPTS)]
    assert tries == [True] * (ATTEMPTS - 1) + [False]
    one_host = HostTable(least=1)
    one_host.update({HERE: 2})
    assert one_host.exclude((HERE, 0), 0.0)
    assert one_host.slots(1e9) == [(HERE, 1)]


def test_after_the_cooldown_a_host_is_used_again_later_with_each_failure() -> None:
    table = HostTable(least=1, cooldown=(10.0, 30.0))
    table.update({HERE: 1, THERE: 1})
    table.exclude((THERE, 0), 100.0)
    assert table.slots(119.0) == [(HERE, 0)]
    assert table.slots(130.0) == [(HERE, 0), (THERE, 0)]
    table.exclude((THERE, 0), 200.0)
    assert table.slots(229.0) == [(HERE, 0)]
    assert table.slots(230.0) == [(HERE, 0), (THERE, 0)]


def test_hosts_keep_their_order_and_ranks_of_the_last_world_come_first() -> None:
    table = HostTable(least=1)
    table.update({THERE: 1})
    table.update({HERE: 2, THERE: 1})
    free = table.slots(0.0)
    assert free == [(THERE, 0), (HERE, 0), (HERE, 1)]
    known = {(HERE, 1): 0, (THERE, 0): None}
    assert plan_slots(free, known, None) == [(HERE, 1), (THERE, 0), (HERE, 0)]
    assert plan_slots(free, known, 1) == [(HERE, 1)]


def test_a_script_prints_the_hosts(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho {HERE}:2\necho {THERE}\n")
    script.chmod(0o755)
    assert run_script(str(script), 3, "job") == [(HERE, "2"), (THERE, "3")]
    script.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(CommandLineError, match="exit code 3: broken"):
        run_script(str(script), None, "job")


# ------------------------------------------------------------------------------- whole jobs

TRAIN = """
import horovod.torch as hvd
import torch

hvd.init()
started = int(os.environ["HOROVOD_RANK"])
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sizes = []

def fail(state):
    pass

@hvd.elastic.run
def train(state):
    sizes.append(hvd.size())
    while state.step < 8:
        if state.step == 4:
            fail(state)
        optimizer.zero_grad()
        model(torch.ones(4, 3) * (state.step + 1)).pow(2).mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=0)
state.register_reset_callbacks([lambda: sizes.append("reset")])
END = 'tell(hvd.rank(), started, sizes, model.weight.tolist())'
"""


def train_script(launch: Launch, fail: str) -> str:
    """A script whose ranks call `fail` in their fifth step, and tell how they ended."""
    body = TRAIN.replace("    pass\n", "".join(f"    {line}\n" for line in fail.splitlines()))
    end = "train(state)\n" + body.partition("END = '")[2].rstrip("'\n") + "\n"
    path = launch.script("", "elastic.py")
    Path(path).write_text(Path(path).read_text() + body.partition("END")[0] + end)
    return path


def one_process(steps: int = 8) -> list[Any]:
    """The parameters of one process, whose gradient is the average of equal ones."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3) * (step + 1)).pow(2).mean().backward()
        optimizer.step()
    return model.weight.tolist()


@pytest.mark.launch
@pytest.mark.parametrize(
    ("victim", "death"),
    [
        (0, "os.kill(os.getpid(), 9)"),
        pytest.param(2, "raise ValueError('spam')", marks=pytest.mark.nightly),
    ],
)
def test_the_others_go_on_from_the_last_commit(launch: Launch, victim: int, death: str) -> None:
    script = train_script(launch, f"if started == {victim}:\n    {death}")
    done = launch.run("-np", 3, "--min-np", 2, "python", script)
    assert done.returncode == 0
    told = launch.events(2)
    living = [rank for rank in range(3) if rank != victim]
    assert [event[:3] for event in told] == [
        [rank, started, [3, "reset", 2]] for rank, started in enumerate(living)
    ]
    for *_, weight in told:
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(one_process()))
    what = "was killed by SIGKILL" if "kill" in death else "failed (exit code 1)"
    assert (
        f"instep: rank {victim} on localhost {what}; this slot of localhost gets no rank any "
        in (done.stderr)
    )
    assert f"goes on with 2 ranks: ranks {living[0]}, {living[1]} of before\n" in done.stderr


@pytest.mark.nightly
@pytest.mark.launch
def test_a_rank_without_which_the_job_cannot_go_on_is_replaced(launch: Launch) -> None:
    script = train_script(
        launch, "if started == 0 and hvd.rank() == 0:\n    os.kill(os.getpid(), 9)"
    )
    done = launch.run("-np", 2, "--min-np", 2, "python", script)
    assert done.returncode == 0
    assert [event[:3] for event in launch.events(2)] == [[0, 1, [2, "reset", 2]], [1, 1, [2]]]
    assert "goes on with 2 ranks: rank 1 of before, and 1 that joined\n" in done.stderr


@pytest.mark.launch
@pytest.mark.nightly
def test_a_job_whose_ranks_all_fail_ends_with_the_first_failure(launch: Launch) -> None:
    script = train_script(launch, "raise ValueError('spam')")
    done = launch.run("-np", 2, "--min-np", 1, "python", script)
    assert done.returncode == 1
    assert "no rank is left that could go on\n" in done.stderr
    assert "ValueError: spam" in done.stderr


@pytest.mark.launch
def test_a_failure_before_the_ranks_have_met_ends_the_job(launch: Launch) -> None:
    script = launch.script("sys.exit(3)")
    done = launch.run("-np", 2, "--min-np", 1, "python", script)
    assert done.returncode == 3
    assert "exited with code 3 before the ranks had met\n" in done.stderr


@pytest.mark.launch
def test_ranks_may_end_without_having_met(launch: Launch) -> None:
    done = launch.run("-np", 2, "--min-np", 1, "python", launch.script(""))
    assert (done.returncode, done.stderr) == (0, "")


DEATH_BEFORE_ITS_SOCKET_ENDS = """
import signal, time

driver, rank = os.getppid(), os.getpid()
if os.fork() == 0:  # has the rank's socket to the driver
    os.kill(driver, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    time.sleep(0.5)
    if os.fork() == 0:
        os.closerange(3, 256)
        time.sleep(0.5)
        os.kill(driver, signal.SIGCONT)
    os._exit(0)
signal.pause()
"""


@pytest.mark.launch
def test_the_driver_may_see_a_death_and_the_end_of_the_socket_at_once(launch: Launch) -> None:
    done = launch.run(
        "-np", 1, "--min-np", 1, "python", launch.script(DEATH_BEFORE_ITS_SOCKET_ENDS)
    )
    assert done.returncode == 137
    assert "was killed by SIGKILL before the ranks had met\n" in done.stderr


@pytest.mark.launch
def test_a_script_that_never_answers_ends_with_the_job(launch: Launch, tmp_path: Path) -> None:
    asked, script = tmp_path / "asked", tmp_path / "hosts.sh"
    tells = """printf '["asks"]\\n' > $EVENTS"""
    script.write_text(
        f"#!/bin/sh\n[ -e {asked} ] && {tells} && sleep 1000\ntouch {asked}\necho {HERE}:1\n"
    )
    script.chmod(0o755)
    flags = ("-np", 1, "--min-np", 1, "--host-discovery-script", script)
    with launch.start(*flags, "python", launch.script("meeting.wait_for(1)")) as process:
        assert launch.event() == ["asks"]
        launch.call()
        done = launch.end_of(process)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.launch
@pytest.mark.nightly
def test_ranks_are_added_where_the_script_finds_hosts_until_the_limit_of_resets(
    launch: Launch, tmp_path: Path
) -> None:
    found, script = tmp_path / "found", tmp_path / "hosts.sh"
    found.write_text(f"{HERE}:1\n")
    script.write_text(f"#!/bin/sh\ncat {found}\n")
    script.chmod(0o755)
    wait = f"""\
if hvd.size() == 1:
    with open({str(found)!r}, "w") as file:
        file.write("{HERE}:1\\n{THERE}:1\\n")
    while True:
        state.check_host_updates()"""
    train = train_script(launch, wait)
    flags = ("-np", 1, "--max-np", 2, "--host-discovery-script", script)
    done = launch.run(*flags, "python", train)
    assert done.returncode == 0
    assert [event[:3] for event in launch.events(2)] == [[0, 0, [1, "reset", 2]], [1, 1, [2]]]
    found.write_text(f"{HERE}:1\n")
    done = launch.run(*flags, "--reset-limit", 0, "python", train)
    assert done.returncode == 1
    assert "and --reset-limit allows no more" in done.stderr
