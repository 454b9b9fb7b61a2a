"""Who am I: the world as the launchers' variables describe it."""

import pytest

from instep.distributed.identity import launchers
from instep.distributed.identity.launchers import detect
from instep.distributed.identity.world import World
from instep.errors import LaunchVariablesError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


def test_a_process_that_nobody_launched_is_a_world_of_one():
    assert detect({}) == World(rank=0, size=1, source="plain Python")


def test_torchrun_says_everything():
    assert detect(TORCHRUN) == World(5, 8, 1, 4, 1, 2, source="torchrun")
    assert not detect(TORCHRUN).one_host


def test_instep_run_comes_before_the_launcher_around_it():
    assert detect(TORCHRUN | {"INSTEP_JOB": "j"}).source == "instep run"


def test_without_local_variables_one_host_is_assumed():
    world = detect({"RANK": "1", "WORLD_SIZE": "3"})
    assert (world.local_rank, world.local_size, world.one_host) == (1, 3, True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "found RANK=1 but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "found WORLD_SIZE=2 but not RANK"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "found TORCHELASTIC_RUN_ID=x but not RANK, WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"rank 4 of 4 \(ranks count from 0\)"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "rank -1 of 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "9 ranks on this host, but 8 in all"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "node rank 2 of 2"),
    ],
)
def test_half_set_or_contradictory_variables_are_named(variables, message):
    with pytest.raises(LaunchVariablesError, match=message):
        detect(variables)


def test_what_rank_and_world_size_alone_say_of_hosts_is_a_guess(monkeypatch):
    """In this process's environment, which takes strings only."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "INSTEP_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launchers.is_one_host(launchers.detect())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launchers.is_one_host(launchers.detect())
