"""`instep run --hosts` and `instep horovodrun -H`: real ssh between two network namespaces."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import components
import networks
import trained
from instep import cli
from instep.errors import CommandLineError
from instep.launch.remote.host_slots import (
    address_towards,
    is_this_host,
    parse_hosts,
    take_slots,
)
from pool import run
from ssh_servers import PORT, SSHServers
from test_same_under import assert_same, environment

TESTS = Path(__file__).parent
FIRST, SECOND = map(networks.address, range(2))
TWO_BY_TWO = f"{FIRST}:2,{SECOND}:2"
INSTEP = [sys.executable, "-m", "instep"]


def test_hosts_and_their_slots() -> None:
    assert parse_hosts("a:2,b,a:1") == {"a": 3, "b": 1}
    assert parse_hosts("a,b:1", 4) == {"a": 4, "b": 1}
    assert take_slots({"a": 2, "b": 2, "c": 9}, 3) == {"a": 2, "b": 1}
    for wrong, said in (
        ("a:0", "slots of a is a whole number, not '0'"),
        ("a:x", "slots of a is a whole number, not 'x'"),
        ("", "'' is no host"),
        ("a,,b", "'' is no host"),
        ("-oProxyCommand=x:1", "'-oProxyCommand=x' is no host. Write hosts as a:4,b:4"),
    ):
        with pytest.raises(CommandLineError, match=said):
            parse_hosts(wrong)
    with pytest.raises(CommandLineError, match="5 ranks, but the hosts have 4 slots"):
        take_slots({"a": 2, "b": 2}, 5)


@pytest.mark.parametrize("host", ["no-such.invalid", "a..b", "a" * 64])
def test_a_host_that_nobody_knows_is_named(host: str) -> None:
    assert not is_this_host(host)
    with pytest.raises(CommandLineError, match=f"the host {re.escape(host)} is not known here: "):
        address_towards(host)


def test_which_host_is_this_one() -> None:
    assert all(map(is_this_host, ("localhost", "127.0.0.1", "127.0.0.9", os.uname().nodename)))
    assert not any(map(is_this_host, ("192.0.2.1", "no.such.host.invalid")))


def test_a_job_has_one_way_to_its_hosts(capsys, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert cli.main(["run", "--hosts", "a:2", "--nnodes", "2", str(script)]) == 2
    assert "leave --nnodes, --node-rank, --master" in capsys.readouterr().err
    assert cli.main(["run", "--hosts", "a:2", "--dist-file", "f", str(script)]) == 2
    assert "--dist-file out." in capsys.readouterr().err
    restarts = ["--max-restarts", "1", "--min", "5"]
    assert cli.main(["run", "--hosts", "a:2,b:2", *restarts, str(script)]) == 2
    assert "--min takes a number of ranks" in capsys.readouterr().err
    assert cli.main(["run", "--hosts", "a:2", str(tmp_path / "other.py")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def launches(test):
    return pytest.mark.launch(components.needs("network namespaces", "ssh")(test))


@pytest.fixture(scope="module")
def hosts():
    if (why := networks.missing()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    with networks.TwoHosts() as two:
        yield two


@pytest.fixture(scope="module")
def servers(hosts, tmp_path_factory):
    with SSHServers(hosts, tmp_path_factory.mktemp("ssh")) as both:
        yield both


def start(hosts, servers, folder, *command, host=0):
    """A command on one of the hosts, whose `ssh` leads to the other."""
    variables = environment(folder)
    variables["PATH"] = f"{servers.path}:{variables.get('PATH', os.environ['PATH'])}"
    return subprocess.Popen(
        hosts.on(host, *command),
        env=variables,
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@launches
@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_one_command_trains_on_two_hosts(hosts, servers, tmp_path, host) -> None:
    two_and_one = f"{FIRST}:2,{SECOND}:1"
    command = [*INSTEP, "run", "--plain", "--hosts", two_and_one, TESTS / "trained.py", tmp_path]
    code, _, err = finish(start(hosts, servers, tmp_path, *command, host=host))
    assert code == 0, err
    (learned,) = run(1, trained.train)
    found = assert_same(tmp_path, 3, torch.tensor(learned), "instep run", beyond=hosts.addresses)
    assert [report["world"][2:] for report in found] == [[0, 2, 0], [1, 2, 0], [0, 1, 1]]


HOROVOD = """
import os
import horovod.torch as hvd
import torch
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()]
own = [int(os.environ["HOROVOD_" + name]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE",
                                                       "CROSS_RANK")]
print(place == own, place, total, os.environ["SAID"], os.environ["HOROVOD_HOSTNAME"], flush=True)
"""


@pytest.mark.nightly
@launches
def test_horovodrun_starts_ranks_on_other_hosts(hosts, servers, tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").write_text(HOROVOD)
    monkeypatch.setenv("SAID", "what the user has set")
    login = ["-p", PORT, "-i", servers.key]
    command = [*INSTEP, "horovodrun", "-np", 3, "-H", TWO_BY_TWO, *login, "python", "train.py"]
    code, out, err = finish(start(hosts, servers, tmp_path, *command))
    assert code == 0, err
    expected = [[0, 3, 0, 2, 0], [1, 3, 1, 2, 0], [2, 3, 0, 1, 1]]
    lines = sorted(re.sub(r"^\[\d\] ", "", line) for line in out.splitlines())
    places = zip(expected, (FIRST, FIRST, SECOND), strict=True)
    assert lines == [f"True {place} 3.0 what the user has set {host}" for place, host in places]


@pytest.mark.nightly
@launches
def test_a_failure_on_the_far_host_ends_all_and_is_shown_once(hosts, servers, tmp_path) -> None:
    (tmp_path / "train.py").write_text(
        "import instep\ninstep.barrier()\n"
        "if instep.rank == 3: raise ValueError('broken here')\ninstep.barrier()\n"
    )
    command = [*INSTEP, "run", "--hosts", TWO_BY_TWO, "train.py"]
    code, _, err = finish(start(hosts, servers, tmp_path, *command))
    assert code == 1
    assert err.count("ValueError: broken here") == 1, err
    assert "rank 3 of 4 failed" in err


@launches
def test_a_host_without_a_login_is_named_at_once(hosts, servers, tmp_path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [*INSTEP, "horovodrun", "-H", TWO_BY_TWO, "-p", 2223, "python", "train.py"]
    code, _, err = finish(start(hosts, servers, tmp_path, *command))
    assert code == 2
    assert "Connection refused" in err
    assert f"instep: cannot start ranks on {SECOND} (exit code 255). It takes a login" in err


SLEEPS = """
import os, sys, time
rank = os.environ["RANK"]
open(f"{sys.argv[1]}/{rank}", "w").close()
if rank == "0":
    while not all(os.path.exists(f"{sys.argv[1]}/{other}") for other in range(4)):
        time.sleep(0.01)
    print("ready", flush=True)
time.sleep(1000)
"""


@launches
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_when_the_command_is_ended_so_are_the_ranks_of_all_hosts(
    hosts, servers, tmp_path, number
) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    command = [*INSTEP, "run", "--plain", "--hosts", TWO_BY_TWO, "train.py", tmp_path]
    process = start(hosts, servers, tmp_path, *command)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    [launcher] = [each for each in processes(tmp_path) if "--hosts" in each.cmdline()]
    ranks = [each for each in processes(tmp_path) if "--hosts" not in each.cmdline()]
    assert len(ranks) == 4
    launcher.send_signal(number)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    code, _, err = finish(process)
    assert code == (143 if number == signal.SIGTERM else 137), err


def processes(folder):
    """Those of Python whose arguments name the folder."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            words = each.cmdline()
            if words[:1] == [sys.executable] and str(folder) in words:
                found.append(each)
    return found
