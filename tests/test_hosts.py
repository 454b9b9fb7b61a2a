"""Several hosts: network namespaces, in which no name resolves and loopback leads nowhere."""

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import components
import networks
import trained
from pool import run
from test_same_under import assert_same, environment

pytestmark = [pytest.mark.launch, components.needs("network namespaces")]

TESTS = Path(__file__).parent
PYTHON = [sys.executable]


@pytest.fixture(scope="module")
def hosts():
    why = networks.missing()
    if why is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    with networks.TwoHosts() as two:
        yield two


@pytest.fixture(scope="module")
def oracle():
    import torch

    (learned,) = run(1, trained.train)
    return torch.tensor(learned)


def start(hosts, folder, command, **more):
    """`command(host)` on both; (code, output, errors) of each."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    hosts.on(host, *command(host)), env=environment(folder, **more), cwd=folder,
                    text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )
            for host in range(len(hosts.addresses))
        ]  # fmt: skip
        for process in processes:
            stack.callback(process.kill)
        ends = [(*process.communicate(timeout=100), process.returncode) for process in processes]
    assert not list((folder / "tmp").glob("instep-*"))
    return [(code, out, err) for out, err, code in ends]


def by_hand(hosts, host, *program, ranks=2, port=29471):
    master = f"{hosts.addresses[0]}:{port}"
    told = ["--nnodes", len(hosts.addresses), "--node-rank", host, "--master", master]
    return [*PYTHON, "-m", "instep", "run", "--plain", "-n", ranks, *told, *program]


def by_file(folder, host, *program):
    told = ["--nnodes", 2, "--node-rank", host, "--dist-file", folder / "meet"]
    return [*PYTHON, "-m", "instep", "run", "-n", 2, *told, *program]


def by_torchrun(hosts, host, *program):
    told = ["--nnodes", 2, "--node-rank", host, "--master-addr", hosts.addresses[0]]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", 29472]
    return [*PYTHON, *torchrun, *told, *program]


def two_by_two(hosts, folder, oracle, command, source):
    ends = start(hosts, folder, lambda host: command(host, TESTS / "trained.py", folder))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert_two_by_two(hosts, folder, oracle, source)


def assert_two_by_two(hosts, folder, oracle, source):
    found = assert_same(folder, 4, oracle, source, beyond=hosts.addresses)
    assert [report["world"][2:] for report in found] == [[0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1]]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [(2, 1, 1), (1, 1, 1), (2, 2, 2)], ids=str)
def test_three_hosts_train_as_one_process(tmp_path, oracle, ranks):
    with networks.Hosts(3) as three:
        ends = start(
            three,
            tmp_path,
            lambda host: by_hand(three, host, TESTS / "trained.py", tmp_path, ranks=ranks[host]),
        )
        assert [code for code, _, _ in ends] == [0] * 3, ends
        assert_same(tmp_path, sum(ranks), oracle, "instep run", beyond=three.addresses)


@pytest.mark.nightly
def test_instep_run_by_a_shared_file(hosts, tmp_path, oracle):
    two_by_two(hosts, tmp_path, oracle, lambda *c: by_file(tmp_path, *c), "instep run")
    assert not (tmp_path / "meet").exists()


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_two_hosts_have_the_bits_of_one_process(hosts, tmp_path):
    training = [TESTS.parent / "benchmarks" / "scripts" / "small_trainings.py", "digits", 8]
    fixed = {"INSTEP_BITWISE": "4", "INSTEP_SEED": "1"}
    alone = subprocess.run(
        [*map(str, (*PYTHON, "-m", "instep", "run", "-n", 1, *training))],
        env=environment(tmp_path, **fixed), text=True, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    master = f"{hosts.addresses[0]}:29473"
    ends = start(
        hosts, tmp_path,
        lambda host: [
            *(*PYTHON, "-m", "instep", "run", "-n", 2, "--nnodes", 2, "--node-rank", host),
            *("--master", master, *training),
        ],
        **fixed,
    )  # fmt: skip
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ends[0][1].split()[1] == alone.stdout.split()[1]


@pytest.mark.nightly
def test_torchrun(hosts, tmp_path, oracle):
    two_by_two(hosts, tmp_path, oracle, lambda *c: by_torchrun(hosts, *c), "torchrun")


def mpirun(hosts, folder, oracle, source, *command, **more):
    """Started on the first host; logs in on the second."""
    words = [*command, *PYTHON, TESTS / "trained.py", folder]
    ran = subprocess.run(
        hosts.on(0, *words), env=environment(folder, **more), cwd=folder, text=True,
        capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert_two_by_two(hosts, folder, oracle, source)


@components.needs("Open MPI")
@pytest.mark.nightly
def test_mpirun_of_open_mpi_says_where_it_was_started(hosts, tmp_path, oracle):
    two = [f"{address}:2" for address in hosts.addresses]
    network = ["--mca", "oob_tcp_if_include", "10.77.0.0/24", "--oversubscribe"]
    login = ["--mca", "plm_rsh_agent", hosts.login(tmp_path)]
    command = ["mpirun.openmpi", *login, *network, "--bind-to", "none", "-n", "4"]
    mpirun(hosts, tmp_path, oracle, "mpirun of Open MPI", *command, "-H", ",".join(two))


@pytest.mark.nightly
@components.needs("MPICH")
def test_ranks_of_mpich_meet_in_the_file_that_the_user_names(hosts, tmp_path, oracle):
    two = [f"{address}:2" for address in hosts.addresses]
    login = ["-launcher", "rsh", "-launcher-exec", hosts.login(tmp_path)]
    command = ["mpirun.mpich", *login, "-iface", hosts.interfaces[0], "-hosts", ",".join(two)]
    source, meet = "mpirun of MPICH or Intel MPI", tmp_path / "meet"
    mpirun(hosts, tmp_path, oracle, source, *command, "-n", "4", INSTEP_DIST_FILE=str(meet))
    assert not meet.exists()


TALKS = """
import resource, sys
import trained
import torch, torch.distributed as dist
import instep
from instep.distributed.communication.transport import get_transport

def kind(group):
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else type(group).__name__

rank = instep.init().rank
whole = dist.group.WORLD
whole.allreduce([torch.ones(3)]).wait()
of_host, between, uneven = (dist.new_group(ranks) for ranks in ([2, 3], [0, 2], [0, 1, 2]))
little = 1 << 20 if rank == 2 else resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (little, resource.RLIM_INFINITY))
without = dist.new_group([0, 1, 2, 3])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
groups = (whole, of_host, between, uneven, without)
for group in groups:
    if kind(group):
        total = torch.ones(70_001)
        dist.all_reduce(total, group=group)
        assert total.eq(dist.get_world_size(group)).all()
total = torch.full((70_001,), [1.0, 2**-12 - 1, 0.0, 0.0][rank])
get_transport().sum_rounded(total, torch.bfloat16).wait()
assert total.eq(2**-12).all(), total
print("kinds", rank, *map(kind, groups))
trained.main(sys.argv[1])
"""


def test_ranks_of_a_host_share_memory_where_they_can_and_others_take_gloo(hosts, tmp_path, oracle):
    """And they learn what one process learns."""
    (tmp_path / "talks.py").write_text(TALKS)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    ends = start(
        hosts, tmp_path, lambda host: by_hand(hosts, host, "talks.py", tmp_path), PYTHONPATH=path
    )
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert_two_by_two(hosts, tmp_path, oracle, "instep run")
    lines = [line.partition("kinds ")[2] for _, out, _ in ends for line in out.splitlines()]
    across, shared, gloo = "ProcessGroupAcrossHosts", "InstepProcessGroup", "ProcessGroupOverGloo"
    assert sorted(lines) == [
        f"0 {across} None {gloo} {across} {gloo}",
        f"1 {across} None None {across} {gloo}",
        f"2 {across} {shared} {gloo} {across} {gloo}",
        f"3 {across} {shared} None None {gloo}",
    ]


APART = """
import sys
import torch, torch.distributed as dist
import instep
model = instep.replicate(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if instep.rank == 1:
    dist.broadcast(torch.ones(2), 0)
else:
    loss.backward()
"""


@pytest.mark.nightly
def test_ranks_of_several_hosts_that_wait_for_each_other_are_named(hosts, tmp_path):
    (tmp_path / "apart.py").write_text(APART)
    first, second = start(
        hosts, tmp_path, lambda host: by_hand(hosts, host, "apart.py"), INSTEP_TIMEOUT="60"
    )
    assert [first[0], second[0]] == [1, 1]
    said = first[2].splitlines()
    at = said.index("the ranks wait for each other in different collectives:")
    assert said[at + 1 : at + 5] == [
        f"  rank {rank} waits in {call} at {tmp_path / 'apart.py'}:{line}"
        for rank, (call, line) in enumerate(
            [("backward", 10), ("broadcast", 8), ("backward", 10), ("backward", 10)]
        )
    ]


DIES = """
import os, signal
import torch
import instep
model = instep.replicate(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if instep.rank == instep.world_size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
loss.backward()
"""


def test_a_rank_that_dies_in_a_backward_of_several_hosts_is_named(hosts, tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    ends = start(hosts, tmp_path, lambda host: by_hand(hosts, host, "dies.py", ranks=2 - host))
    for code, _, err in ends:
        assert code == 137
        assert "instep: rank 2 of 3 was killed by SIGKILL on h1; ranks 0, 1 were stopped" in err


@pytest.mark.nightly
def test_with_rank_and_world_size_alone_a_death_on_the_other_host_is_named(hosts, tmp_path):
    """As in a pod of Kubernetes: nothing says how many ranks a host has. The watch works between
    the hosts all the same."""
    (tmp_path / "dies.py").write_text(DIES)

    def alone(host):
        place = [f"RANK={host}", "WORLD_SIZE=2", f"MASTER_ADDR={hosts.addresses[0]}"]
        return ["env", *place, "MASTER_PORT=29483", sys.executable, "dies.py"]

    (first, _, err), (second, _, second_err) = start(hosts, tmp_path, alone, INSTEP_TIMEOUT="60")
    assert (first, second) == (137, 137), second_err

    assert "instep: rank 1 of 2 was killed by SIGKILL on h1; rank 0 was stopped" in err + second_err


STOPS = """
import os, signal
from datetime import timedelta
import torch, torch.distributed as dist
import instep
instep.init()
group = dist.new_group(timeout=timedelta(seconds=1))
dist.all_reduce(torch.ones(2), group=group)
if instep.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(2), group=group)
"""


@pytest.mark.nightly
def test_a_stopped_rank_that_the_others_wait_for_is_not_said_to_have_been_killed(hosts, tmp_path):
    """It was: its watcher killed it, since it could not exit with the others."""
    (tmp_path / "stops.py").write_text(STOPS)
    ends = start(hosts, tmp_path, lambda host: by_hand(hosts, host, "stops.py", ranks=1 + host))
    for code, _, err in ends:
        assert code == 1, err
        assert re.search(
            r"instep: rank [02] of 3 failed \(exit code 1\) on h[01]; ranks .* were stopped", err
        )
        assert re.search(r"rank 1 (on h1|\(pid \d+\)) did not come to all_reduce", err)


FAILS = """
import os, signal, sys
rank = int(os.environ["RANK"])
if rank == 2:
    raise ValueError("boo")
while True:
    signal.pause()
"""


def test_a_failure_on_one_host_ends_the_job_on_all(hosts, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    ends = start(hosts, tmp_path, lambda host: by_hand(hosts, host, "fails.py"))
    for code, _, err in ends:
        assert code == 1
        assert err.startswith(
            "instep: rank 2 of 4 failed (exit code 1) on h1; ranks 0, 1, 3 were stopped"
        )
        assert err.endswith("ValueError: boo\n")


LOST = """
import os, signal
if os.environ["GROUP_RANK"] == "1" and os.environ["LOCAL_RANK"] == "0":
    os.kill(os.getppid(), signal.SIGKILL)
while True:
    signal.pause()
"""


def test_a_host_whose_supervisor_dies_is_lost(hosts, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    (code, _, err), (other, _, _) = start(
        hosts, tmp_path, lambda host: by_hand(hosts, host, "lost.py")
    )
    assert (code, other) == (1, 128 + 9)
    assert "rank 2 of 4 was lost with its host h1" in err


CUT = """
import os, signal, sys
with open(sys.argv[1], "w") as there:
    there.write(".")
while True:
    signal.pause()
"""


def test_hosts_that_lose_each_other_end_their_ranks(tmp_path):
    (tmp_path / "cut.py").write_text(CUT)
    os.mkfifo(tmp_path / "there")
    there = os.open(tmp_path / "there", os.O_RDWR)
    with networks.TwoHosts() as hosts:

        def pull_the_cable():
            arrived = 0
            while arrived < 4:
                arrived += len(os.read(there, 4))
            hosts.cut()

        puller = threading.Thread(target=pull_the_cable)
        puller.start()
        ends = start(hosts, tmp_path, lambda host: by_hand(hosts, host, "cut.py", "there"))
        puller.join()
    os.close(there)
    for host, (code, _, err) in enumerate(ends):
        assert code == 1
        assert f"rank {2 - 2 * host} of 4 was lost with its host h{1 - host}" in err


ASKED = """
import sys, instep
instep.barrier()
if instep.rank == 3:
    with open(sys.argv[1], "w") as there:
        there.write(".")
    open(sys.argv[2]).read()  # here
instep.barrier()
"""


@pytest.mark.nightly
def test_a_job_is_asked_on_any_of_its_hosts(hosts, tmp_path):
    (tmp_path / "asked.py").write_text(ASKED)
    for name in ("there", "go"):
        os.mkfifo(tmp_path / name)
    there = os.open(tmp_path / "there", os.O_RDWR)
    answers = []
    waits = re.compile(r"ranks 0-2 wait in barrier at .*asked.py:8")

    def ask():
        os.read(there, 1)
        where = [*PYTHON, "-m", "instep", "where"]
        until = time.monotonic() + 60
        for host in (1, 0):
            answer = ""
            while not waits.search(answer) and time.monotonic() < until:  # others are on their way
                asked = subprocess.run(hosts.on(host, *where), capture_output=True, text=True)
                answer = asked.stdout + asked.stderr
            answers.append(answer)
        (tmp_path / "go").write_text("")

    asker = threading.Thread(target=ask)
    asker.start()
    ends = start(hosts, tmp_path, lambda host: by_hand(hosts, host, "asked.py", "there", "go"))
    asker.join()
    os.close(there)
    assert [code for code, _, _ in ends] == [0, 0], ends
    for answer in answers:
        assert waits.search(answer), answers
        assert re.search(r"rank 3 is in user code at .*asked.py:7, waiting for a file", answer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": ["--lr", "2"]}, "the hosts were started with different arguments: "
         "--lr 1 on host 0; --lr 2 on host 1"),
        ({"script": "other.py"}, "the hosts run different scripts: "),
        ({"version": "0.0.9"}, "two versions of instep in one job: "),
    ],
)  # fmt: skip
def test_what_is_not_one_job_is_refused_on_every_host(hosts, tmp_path, change, message):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "other.py").write_text("1")
    package = _another_version(tmp_path, change.get("version"))

    def command(host):
        changed = change if host == 1 else {}
        program = [changed.get("script", "train.py"), *changed.get("arguments", ["--lr", "1"])]
        path = package if "version" in changed else os.environ.get("PYTHONPATH", "")
        return ["env", f"PYTHONPATH={path}", *by_hand(hosts, host, *program)]

    for code, _, err in start(hosts, tmp_path, command):
        assert code == 2
        assert err.startswith(f"instep: {message}")


def _another_version(folder, version):
    """A copy of the package that says so of itself."""
    import shutil

    import instep

    if version is None:
        return None
    copy = shutil.copytree(Path(instep.__file__).parent, folder / "old" / "instep")
    text = (copy / "version.py").read_text()
    (copy / "version.py").write_text(text.replace(instep.__version__, version))
    return copy.parent


def test_a_host_that_never_comes_is_named_and_so_are_those_that_did(hosts, tmp_path):
    (tmp_path / "train.py").write_text("")
    ran = subprocess.run(
        hosts.on(0, *by_hand(hosts, 0, "train.py")),
        env=environment(tmp_path, INSTEP_TIMEOUT="1"), cwd=tmp_path, text=True,
        capture_output=True, timeout=30, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "host 1 of 2 did not come within 1 seconds; those that came: host 0 on h0." in ran.stderr
