"""Ranks meet: by every method, on loopback only, or with an error that says what to do."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

import instep
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import join_check
from instep.distributed.rendezvous.devices import check_devices_differ
from instep.errors import (
    DeviceError,
    LaunchVariablesError,
    LeftoverRendezvousError,
    PortInUseError,
    RendezvousError,
)
from instep.process.exit_status import group_ranks
from launching import free_port
from pool import run

pytestmark = pytest.mark.launch

REPORT = """
import json, os, sys, torch, torch.distributed as dist, instep
{before}
total = instep.all_reduce(torch.tensor(instep.rank + 1.0)).item()
names = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{{kind}}")]
inodes = {{os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
          if os.path.exists(f"/proc/self/fd/{{fd}}")}}
listening = [n[1] for n in names if n[3] == "0A" and f"socket:[{{n[9]}}]" in inodes]
report = dict(rank=instep.rank, size=instep.world_size, source=instep.world.source,
              total=total, listening=listening)
with open(sys.argv[1] + str(instep.rank), "w") as file:
    json.dump(report, file)
"""
LOOPBACK = ("0100007F:", "00000000000000000000000001000000:")


def script(folder, before=""):
    path = folder / "report.py"
    path.write_text(REPORT.format(before=before))
    return [str(path), str(folder / "rank")]


def reports(folder, size):
    found = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]
    assert [r["rank"] for r in found] == list(range(size))
    assert {(r["size"], r["total"]) for r in found} == {(size, size * (size + 1) / 2)}
    return found


def only_loopback(found):
    return all(address.startswith(LOOPBACK) for r in found for address in r["listening"])


def clean_environ(**more):
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "INSTEP_", "GLOO")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return kept | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in more.items()}


def start(size, command, environ):
    """`size` bare processes, each of which `command(rank)`, are told who they are."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command(rank)], env=environ(rank), stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=50)[1] for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize(
    "method",
    ["env", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tcp", "file", "store"))],
)
def test_bare_processes_meet_by(method, tmp_path):
    port = free_port()
    before = {
        "env": "",
        "tcp": f"instep.init('tcp://127.0.0.1:{port}')",
        "file": f"instep.init('file://{tmp_path}/meet')",
        "store": f"instep.init(dist.FileStore('{tmp_path}/store', 2))",
    }[method]
    codes, errors = start(
        2,
        lambda _: script(tmp_path, before),
        lambda rank: clean_environ(
            RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        ),
    )
    assert codes == [0, 0], errors
    assert only_loopback(reports(tmp_path, 2))


def test_a_folder_for_checkpoints_that_is_not_used_is_mentioned_once(tmp_path):
    """torchrun starts a script with two lines by itself, and nobody looks at INSTEP_CHECKPOINT."""
    path = tmp_path / "train.py"
    path.write_text("import instep\ninstep.barrier()\ninstep.barrier()\n")
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place["INSTEP_CHECKPOINT"] = tmp_path / "saved"
    _, (first, second) = start(
        2, lambda rank: [path], lambda rank: clean_environ(RANK=rank, **place)
    )
    assert first == (
        "instep: INSTEP_CHECKPOINT is not used here: it is for unedited scripts. Let this script, "
        "which calls instep itself, save with instep.Checkpoint.\n"
    )
    assert second == ""
    assert not (tmp_path / "saved").exists()


def test_ranks_that_are_not_of_one_job_are_refused_on_all(tmp_path):
    port = free_port()
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    codes, errors = start(
        2,
        lambda rank: [*script(tmp_path), "--lr", str(rank), "--local_rank", str(rank)],
        lambda rank: clean_environ(RANK=rank, **place),
    )
    assert codes == [1, 1]
    told = rf"MixedJobError: the ranks .* different arguments: {tmp_path}/rank --lr 0 on rank 0; "
    assert all(re.search(told, error) for error in errors), errors


ORPHANS = """
import multiprocessing, sys
import torch

def main(rank, place):
    import instep
    instep.init(place, rank=rank, world_size=3)

if __name__ == "__main__":
    processes = multiprocessing.get_context(sys.argv[2])
    for rank in range(2):
        processes.Process(target=main, args=(rank, sys.argv[1])).start()
"""


@pytest.mark.parametrize(
    ("method", "start"),
    [("tcp", "fork"), pytest.param("file", "forkserver", marks=pytest.mark.nightly)],
)
def test_ranks_whose_parent_was_killed_do_not_wait_for_the_others(tmp_path, method, start):
    place = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meet"}[method]
    (tmp_path / "train.py").write_text(ORPHANS)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py"), place, start],
        env=clean_environ(INSTEP_ARRIVAL_NOTICE=0),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        try:
            assert "for rank" in parent.stderr.readline()
            parent.kill()
            said = parent.stderr.read()  # to the last rank's end
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert "RendezvousError: the process that started this rank was ended" in said


def test_ranks_that_never_come_are_named_with_the_hosts_that_did():
    store = dist.HashStore()

    def hear():
        with pytest.raises(RendezvousError) as raised:
            join_check.check_join(store, World(2, 4, 2, 4), timedelta())  # its time is over first
        heard.append(str(raised.value))

    heard = []
    other = threading.Thread(target=hear)
    other.start()
    store.wait(["instep/fingerprint2"])
    told = f"ranks 1, 3 of 4 did not come .*; those that came: ranks 0, 2 on {socket.gethostname()}"
    with pytest.raises(RendezvousError, match=told) as raised:
        join_check.check_join(store, World(0, 4, 0, 4), timedelta(seconds=0.2))
    other.join()
    assert heard == [str(raised.value)]


REFUSED = """
torch.cuda.is_available = lambda: False
from instep import errors
def refused(error, *told, **named):
    try:
        dist.init_process_group(*told, **named)
    except error as refusal:
        print(refusal)
refused(errors.BackendError, "nccl")
refused(errors.BackendError, "cpu:gloo,cuda:nccl")
refused(errors.BackendError, backend="MPI")
taken = dict(init_method=f"tcp://127.0.0.1:{{sys.argv[2]}}", rank=0, world_size=2)
refused(errors.PortInUseError, "gloo", **taken)
"""


def test_what_init_process_group_cannot_do_is_answered_with_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = ["-m", "instep", "run", "-n", "1", *script(tmp_path, REFUSED.format()), str(port)]
        ran = subprocess.run(
            [sys.executable, *command], env=clean_environ(), capture_output=True, text=True
        )
    assert ran.returncode == 0, ran.stderr
    for line, told in zip(
        ran.stdout.splitlines(),
        (
            "the backend 'nccl' needs GPUs, .* sees none on this host. Pass 'gloo' for CPUs",
            "the backend 'nccl' needs GPUs",
            "the backend 'mpi' needs a torch that was built .* mpirun can still start the ranks",
            f"port {port} on 127.0.0.1 is in use by another process",
        ),
        strict=True,
    ):
        assert re.match(told, line)


def test_a_process_that_nobody_launched_talks_to_nobody(tmp_path):
    subprocess.run([sys.executable, *script(tmp_path)], env=clean_environ(), check=True)
    (found,) = reports(tmp_path, 1)
    assert found["source"] == "plain Python"
    assert found["listening"] == []


# The pool's rank of a world of one has no process group: what fails early can be tried there.


def refused(error, match, *args, environ=(), **kwargs):
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        with pytest.raises(error, match=match):
            instep.init(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert not dist.is_initialized()


def port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(
            PortInUseError,
            f"port {port} on 127.0.0.1 is in use by another process",
            f"tcp://127.0.0.1:{port}",
            rank=0,
            world_size=2,
        )


def leftover_file(path):
    store = dist.FileStore(path, 2)
    store.add("instep/rank1", 1)
    refused(LeftoverRendezvousError, "rank 1 has met there before", f"file://{path}",
            rank=1, world_size=2)  # fmt: skip


def bad_arguments():
    refused(RendezvousError, "cannot meet at 'udp://x:1'", "udp://x:1", rank=0, world_size=2)
    refused(RendezvousError, "give both rank and world_size", rank=0)
    refused(RendezvousError, "'no-such-host.invalid' does not resolve",
            "tcp://no-such-host.invalid:1", rank=0, world_size=2)  # fmt: skip
    refused(LaunchVariablesError, "but not MASTER_ADDR, MASTER_PORT",
            environ={"RANK": "0", "WORLD_SIZE": "2"})  # fmt: skip
    refused(LaunchVariablesError, "rank 4 of 4", rank=4, world_size=4)


def too_few_gpus():
    import torch

    from instep.distributed.identity import torch_devices

    torch_devices.accelerator_type = lambda: "cuda"
    torch.accelerator.device_count = torch.cuda.device_count = lambda: 2
    dist.is_backend_available = lambda name: True
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    refused(DeviceError, "4 ranks on this host, but only 2 GPUs visible",
            "file:///nowhere", environ=told)  # fmt: skip
    # On how many hosts these four are, nobody has said.
    taken = []
    torch_devices.set_index = taken.append
    refused(RendezvousError, "cannot meet at 'udp://x:1'", "udp://x:1", rank=3, world_size=4)
    assert taken == [1]


def test_a_port_in_use():
    run(1, port_in_use)


def test_a_rendezvous_file_of_another_job(tmp_path):
    run(1, leftover_file, str(tmp_path / "meet"))


def test_what_cannot_work_is_said_before_anybody_waits():
    run(1, bad_arguments)


def test_more_ranks_than_gpus():
    with pytest.raises(AssertionError, match="left on purpose"):
        run(1, gpus_then_leave)


def gpus_then_leave():
    too_few_gpus()  # replaces functions of torch: this process must not be kept
    raise AssertionError("left on purpose")


def test_gpus_given_twice_are_found():
    claims = ["a, GPU-1", "b, GPU-1", "a, GPU-1"]
    assert group_ranks(claims) == {"a, GPU-1": [0, 2], "b, GPU-1": [1]}


@pytest.mark.parametrize("devices", [["GPU-1", "GPU-2", "GPU-1"], ["GPU-1", "GPU-2", "GPU-3"]])
def test_every_rank_is_told_of_a_gpu_given_twice_before_the_process_group_is_made(devices):
    store, said = dist.HashStore(), {}

    def claim(rank):
        try:
            check_devices_differ(store, World(rank, 3, rank, 3), devices[rank])
        except DeviceError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=claim, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared = f"ranks 0, 2 share one GPU ({socket.gethostname()}, GPU-1); each rank needs its own. "
    if len({*devices}) == 3:
        assert said == {}
    else:
        assert [said[rank].startswith(shared) for rank in range(3)] == [True] * 3


@pytest.mark.nightly
def test_no_thread_of_the_process_group_outlives_it(tmp_path):
    script = tmp_path / "threads.py"
    script.write_text("""
import atexit, os, sys
def report():  # registered first, so called last
    tasks = os.listdir("/proc/self/task")
    tasks = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
    with open(sys.argv[1] + os.environ["RANK"], "w") as file:
        file.write(" ".join(tasks))
atexit.register(report)
import torch, instep
model = instep.replicate(torch.nn.Linear(2, 2))
torch.optim.SGD(model.parameters(), 0.1)  # imports modules of torch.distributed
""")
    command = [sys.executable, "-m", "instep", "run", "-n", "2", str(script), str(tmp_path / "r")]
    subprocess.run(command, env=clean_environ(), check=True)
    for rank in range(2):
        threads = (tmp_path / f"r{rank}").read_text()
        assert "python" in threads
        assert "gloo" not in threads
