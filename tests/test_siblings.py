"""Which ranks of this host have ended, before they have met."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import instep
from instep.distributed.identity import local_ranks

pytestmark = pytest.mark.slow

WAITS = """
import os, sys, time
from instep.distributed.identity import launchers
world = launchers.detect(os.environ | dict(word.split("=") for word in sys.argv[1:]))
siblings = launchers.local_ranks(world)
if siblings is None:
    sys.exit("None")
siblings.ended()
if os.path.exists("end"):
    open("end", "w").close()
deadline = time.monotonic() + SECONDS
while not siblings.ended() and time.monotonic() < deadline:
    time.sleep(0.05)
print(sorted(siblings.ended()))
"""
MPICH = "PMI_SIZE=2 MPI_LOCALNRANKS=2 MPI_LOCALRANKID={0} PMI_RANK={0}"
UNREAPED = f"exec timeout 20 env {MPICH}"
UNEQUAL = (
    "TORCHELASTIC_RUN_ID=x RANK=$((1 + {0})) WORLD_SIZE=4 LOCAL_RANK={0} "
    "LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=3"
)
CYCLIC = MPICH.replace("PMI_RANK={0}", "PMI_RANK=$((2 * {0}))").replace("PMI_SIZE=2", "PMI_SIZE=4")
BARE = "WORLD_SIZE=2 RANK={0}"
HOROVODRUN = "HOROVOD_SIZE=2 HOROVOD_RANK={0}"
LIVES = "{} sh -c 'read line <&3'"
ENDS = "{} sh -c 'read line <end'"
COMES = "{{ read line <end; exec env {} sh -c 'read line <&3'; }}"


def see(folder, variables, other, *told, seconds=2.0):
    """What rank 0 says of the other one, which the same shell has started, in so many seconds."""
    (folder / "waits.py").write_text(WAITS.replace("SECONDS", str(seconds)))
    if other in (ENDS, COMES):
        os.mkfifo(folder / "end")
    source = str(Path(instep.__file__).parent.parent)
    second, first = other.format(variables.format(1)), f'{variables.format(0)} "$@"'
    shell = f"exec 3<&0; {second} >/dev/null 2>&1 & {first}"
    with subprocess.Popen(
        ["sh", "-c", shell, "sh", sys.executable, "waits.py", *told], cwd=folder, text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": source}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as shell_and_ranks:  # fmt: skip
        assert shell_and_ranks.stdout is not None
        return shell_and_ranks.stdout.read().strip()  # the other one ends with its stdin


@pytest.mark.parametrize(
    ("variables", "other", "seen"),
    [
        (MPICH, "true", "[1]"),  # before anybody looked
        (UNREAPED, "true", "[1]"),
        (MPICH, ENDS, "[1]"),
        (MPICH, COMES, "[]"),
        (MPICH, LIVES, "[]"),
        (MPICH, "env -i /bin/cat <&3", "[]"),  # it may be the rank, and has hidden that
        (BARE, "true", "[]"),  # it may be started later
        (BARE, ENDS, "[1]"),
        (HOROVODRUN, "true", "[]"),  # it may have another parent
    ],
)
def test_a_rank_whose_process_is_not_there_has_ended(tmp_path, variables, other, seen):
    assert see(tmp_path, variables, other, seconds=0.5 if seen == "[]" else 20) == seen


@pytest.mark.parametrize(
    ("variables", "other", "seen"),
    [
        (UNEQUAL, LIVES, "[]"),  # ranks 1 and 2: it was taken for a host of the ranks 2 and 3
        (UNEQUAL, "true", "[2]"),
        (CYCLIC, LIVES, "[]"),  # ranks 0 and 2
    ],
)
def test_hosts_of_unequal_size_and_ranks_in_another_order(tmp_path, variables, other, seen):
    assert see(tmp_path, variables, other, seconds=1.5 if seen == "[]" else 20) == seen


def test_ranks_of_another_world_are_not_meant(tmp_path):
    """A task of mpirun has started ranks itself."""
    assert see(tmp_path, MPICH, "true", "RANK=0", "WORLD_SIZE=4") == "None"


def test_a_process_that_ends_while_it_is_looked_at_is_no_rank(monkeypatch):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    monkeypatch.setattr(local_ranks, "find_launcher_process", lambda *_: (os.getpid(), ""))
    monkeypatch.setattr(local_ranks, "children", lambda _: [ended.pid])
    monkeypatch.setattr(local_ranks, "is_alive", lambda _: True)
    assert local_ranks.LocalRanks([0, 1], "RANK", {}).ended() == frozenset()
