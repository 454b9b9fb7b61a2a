"""Who arrives, from where, and whether they are one job."""

import argparse
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress

import pytest

from instep.distributed import interfaces
from instep.distributed.identity import endpoints
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import job_fingerprint, listening
from instep.distributed.rendezvous.arrival_wait import ArrivalWait
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.errors import CommandLineError, MixedJobError, PortInUseError, RendezvousError
from instep.launch.multi_node.hosts import parse_address
from instep.launch.multi_node.supervisor_rendezvous import Participant, join_rendezvous
from instep.launch.worker import local_rank_argument
from instep.unedited import session
from launching import free_port

pytestmark = pytest.mark.slow

CARD = JobFingerprint("h", "net", "1.0", "train.py (abc)", ("--lr", "1"))


def card(**changed):
    return JobFingerprint(**(CARD.to_json() | changed))


# ------------------------------------------------------------------------------------------ cards


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"instep": "0.9"}, "two versions of instep in one job: 1.0 on ranks 0, 2; 0.9 on rank 1"),
        ({"script": "test.py (d)"}, r"different scripts: train.py \(abc\) on ranks 0, 2; test.py"),
        ({"arguments": ()}, "different arguments: --lr 1 on ranks 0, 2; none on rank 1"),
    ],
)
def test_what_is_not_one_job_is_named(changed, message):
    with pytest.raises(MixedJobError, match=message):
        job_fingerprint.check_same_job({0: CARD, 1: card(**changed), 2: CARD}, "rank")


@pytest.mark.parametrize(
    "changed", [{"host": 3}, {"arguments": ["--lr", 1]}, {"arguments": 7}, {"other": "text"}]
)
def test_what_is_no_fingerprint_is_refused(changed):
    assert JobFingerprint.from_json(CARD.to_json()) == CARD
    with pytest.raises(TypeError):
        JobFingerprint.from_json(CARD.to_json() | changed)


def test_one_job_on_several_hosts_is_one_job():
    job_fingerprint.check_same_job({0: CARD, 1: card(host="other", network="other")}, "rank")


def test_an_argument_that_tells_a_rank_its_place_is_no_difference(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    one = JobFingerprint.of_command(
        [str(script), "--local_rank=0", "--lr", "1", "--node-rank", "0", "x"]
    )
    other = JobFingerprint.of_command(
        [str(script), "--local-rank=1", "--lr", "1", "--node-rank", "1", "x"]
    )
    assert one == other
    assert one.arguments == ("--lr", "1", "x")
    assert one.script.startswith("train.py (")


def test_a_copy_elsewhere_is_the_same_script_until_it_is_changed(tmp_path):
    paths = [tmp_path / name / "train.py" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("pass")
    one, copy = (JobFingerprint.of_command([str(path)]) for path in paths)
    assert one == copy
    paths[1].write_text("pass\n")
    assert JobFingerprint.of_command([str(paths[1])]).script != one.script


# ------------------------------------------------------------------------------ interfaces, sockets


def test_the_interface_of_loopback_is_loopback():
    assert ("lo", "127.0.0.1") in interfaces.addresses()
    assert interfaces.find_interface("127.0.0.1") == "lo"
    assert interfaces.find_interface("localhost") == "lo"


def test_an_own_address_is_reached_through_the_interface_that_has_it():
    for name, found in interfaces.addresses():
        if found in interfaces.routable_addresses():
            assert interfaces.find_interface(found) == name


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (["10.0.0.1", "fe80::1", "fd00::1"], "10.0.0.1"),
        (["fe80::1", "fd00::1"], "fd00::1"),  # hosts without IPv4 did not start
        (["fe80::1"], "fe80::1"),
        ([], "127.0.0.1"),
    ],
)
def test_an_address_of_the_link_alone_is_no_address_for_other_hosts(monkeypatch, found, chosen):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable0,cable1")
    of_hosts = [("lo", "127.0.0.1"), *(("cable0", address) for address in found)]
    monkeypatch.setattr(interfaces, "addresses", lambda: of_hosts)
    assert interfaces.address_of_gloo() == chosen


def test_nobody_known_is_outside():
    outer = interfaces.find_interface(None)
    assert outer is None if not interfaces.routable_addresses() else outer != "lo"


def test_a_socket_is_reserved_and_taken():
    with listening.bind("127.0.0.1") as held:
        port = held.getsockname()[1]
        with listening.bind("127.0.0.1", port):
            pass  # a script that binds the port itself can
        with (
            listening.listen("127.0.0.1", port),
            pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"),
        ):
            listening.bind("127.0.0.1", port)


def test_an_address_of_somebody_else_is_no_place_to_listen():
    with pytest.raises(RendezvousError, match=r"cannot listen on 198.51.100.1:1 .*rank 0"):
        listening.bind("198.51.100.1", 1)


def test_a_host_whose_loopback_interface_is_down_is_told_so():
    unshared = ("unshare", "--user", "--map-root-user", "--net")
    if not shutil.which("unshare") or subprocess.run([*unshared, "true"], check=False).returncode:
        pytest.skip("no process may have a network of its own here")
    command = (sys.executable, "-m", "instep", "run", "-n", "2", "-m", "this")
    ran = subprocess.run([*unshared, *command], check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == (
        "instep: the ranks of this host meet at 127.0.0.1, which cannot be reached (Network is "
        "unreachable): the interface lo is down (`ip link set lo up`), or has no address of IPv4.\n"
    )


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "host:70000", "a/b:1", "u@h:1"])
def test_a_master_is_host_and_port(text):
    assert parse_address("[::1]:9").host == "::1"
    assert (parse_address("h:9").host, parse_address("h:9").port) == ("h", 9)
    with pytest.raises(CommandLineError, match="--master takes HOST:PORT, not"):
        parse_address(text)


# ------------------------------------------------------------------------------------- the assembly


@pytest.fixture
def late_after(monkeypatch):
    """A wait is over after the first line that it prints when so many members are there."""

    def over(count):
        def check(wait, arrived=dict):
            are_there, now = len(arrived()) == count, time.monotonic()
            if are_there and not noticed:
                noticed.append(wait)
                wait._next_line = 0.0
                wait._begin = now
            else:
                wait._begin = now - (wait._seconds if are_there else 0)
            honest(wait, arrived)

        monkeypatch.setattr(ArrivalWait, "check", check)

    noticed = []
    honest = ArrivalWait.check
    return over


def come(place, *members, seconds=50.0):
    """What each of the members hears: the facts, or the error."""
    heard = {}

    def one(key, member):
        try:
            assembly = join_rendezvous(
                place, member, lambda all_: {"ranks": [m.ranks for m in all_]}, seconds
            )
            heard[key] = assembly.values
            for line in assembly.connections.values():
                line.close()
        except (MixedJobError, RendezvousError) as error:
            heard[key] = str(error)

    threads = [threading.Thread(target=one, args=item) for item in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [heard[key] for key in range(len(members))]


@pytest.fixture(params=["address", "file"])
def place(request, tmp_path):
    if request.param == "file":
        return endpoints.PrivateFile(str(tmp_path / "note"))
    return endpoints.Address("127.0.0.1", free_port(), "job")


def test_all_hear_what_the_first_decides(place):
    members = [Participant(k, 3, CARD, ranks=10 + k) for k in (2, 0, 1)]
    assert come(place, *members) == [{"ranks": [10, 11, 12]}] * 3


def test_all_hear_why_they_are_not_one_job(place):
    heard = come(place, Participant(0, 2, CARD, 1), Participant(1, 2, card(instep="0.9"), 1))
    assert heard[0] == heard[1]
    assert heard[0].startswith("two versions of instep in one job")


def test_all_hear_who_is_missing_and_who_is_there(place, late_after):
    late_after(2)
    heard = come(place, Participant(0, 3, CARD, 1), Participant(1, 3, card(host="i"), 1))
    expected = (
        "rank 2 of 3 did not come within 50 seconds; those that came: rank 0 on h, rank 1 on i."
    )
    assert [text.startswith(expected) for text in heard] == [True, True]


def test_who_waits_long_says_for_whom(place, late_after, capfd):
    late_after(2)
    come(place, Participant(0, 4, CARD, 1), Participant(2, 4, card(host="i"), 1))
    assert (
        "instep: has waited 0 s for ranks 1, 3 of 4 to arrive, and waits 50 s more; "
        "those that came: rank 0 on h, rank 2 on i.\n"
    ) in capfd.readouterr().err


def test_who_does_not_find_the_first_says_so(place, late_after, capfd):
    late_after(0)
    come(place, Participant(1, 3, CARD, 1))
    expected = "instep: has waited 0 s for rank 0 of 3 to arrive, and waits 50 s more.\n"
    assert capfd.readouterr().err == expected


def test_the_others_hear_that_the_first_never_came(place, late_after):
    late_after(0)
    (heard,) = come(place, Participant(1, 2, CARD, 1))
    assert heard.startswith("rank 0 of 2 did not come within 50 seconds.")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            Participant(1, 3, card(host="j"), 1),
            "rank 0 expects 2 ranks, but j came as rank 1 of 3.",
        ),
        (
            Participant(2, 3, card(host="j"), 1),
            "rank 0 expects 2 ranks, but j came as rank 2 of 3.",
        ),
    ],
)
def test_who_counts_differently_is_named(place, second, message):
    heard = come(place, Participant(0, 2, CARD, 1), second)
    assert [text.startswith(message) for text in heard] == [True, True]


def test_who_comes_twice_is_named(place):
    twice = [Participant(1, 3, card(host=name), 1) for name in "ij"]
    heard = come(place, Participant(0, 3, CARD, 1), *twice)
    assert {text.split(". ")[0] for text in heard} <= {
        "rank 1 has come twice, from i and from j",
        "rank 1 has come twice, from j and from i",
    }


def test_a_stranger_is_sent_away():
    place = endpoints.Address("127.0.0.1", free_port(), "job")
    heard = []
    first = threading.Thread(target=lambda: heard.extend(come(place, Participant(0, 2, CARD, 1))))
    first.start()
    with _connected(place) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # the number that whoever comes is told; then it is hung up on
    heard += come(place, Participant(1, 2, CARD, 1))
    first.join()
    assert heard == [{"ranks": [1, 1]}] * 2


def _connected(place):
    while True:
        try:
            return socket.create_connection((place.host, place.port))
        except ConnectionRefusedError:
            continue


# ------------------------------------------------------------------------------------ --local_rank


@pytest.fixture
def offered(monkeypatch):
    """Local rank 3 for this test's parsers."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args",
                        argparse.ArgumentParser.parse_known_args)  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    local_rank_argument.add_local_rank(World(3, 4, 3, 4))


@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_a_script_gets_its_local_rank_in_the_spelling_that_it_declares(offered, spelling):
    parser = argparse.ArgumentParser()
    parser.add_argument(spelling, type=int, default=-1)
    parser.add_argument("--lr")
    assert vars(parser.parse_args()) == {"local_rank": 3, "lr": "1"}
    assert vars(parser.parse_args(["--lr", "2"]))["local_rank"] == -1  # not the command line
    sys.argv[1:] = [f"{spelling}=1"]
    assert parser.parse_args().local_rank == 1


@pytest.fixture
def divided(monkeypatch):
    """As in an unedited script on several ranks; yields what it is left alone for."""
    reasons = []

    def opt_out(reason):
        reasons.append(reason)
        session._current.value = None

    current = types.SimpleNamespace(world=World(3, 4, 3, 4))
    monkeypatch.setattr(session._current, "value", current)
    monkeypatch.setattr(session, "_at_opt_out", [])
    monkeypatch.setattr(session, "opt_out", opt_out)
    return reasons


def test_a_divided_script_gets_its_own_default_until_it_is_left_alone(offered, divided):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--lr")
    args = parser.parse_args()
    assert (divided, vars(args)) == ([], {"local_rank": -1, "lr": "1"})
    for function in session._at_opt_out:
        function()
    assert vars(args) == {"local_rank": 3, "lr": "1"}


def test_a_script_that_requires_its_local_rank_is_left_alone(offered, divided):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, required=True)
    parser.add_argument("--lr")
    assert vars(parser.parse_args()) == {"local_rank": 3, "lr": "1"}
    assert divided == ["it requires --local-rank"]


def test_a_script_that_declares_none_sees_none(offered):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    assert vars(parser.parse_args()) == {"lr": "1"}


def test_a_command_of_the_script_does_not_get_it_twice(offered):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    inner = parser.add_subparsers().add_parser("fit")
    inner.add_argument("--lr")
    sys.argv[1:] = ["fit", "--lr", "1"]
    assert vars(parser.parse_args()) == {"local_rank": 3, "lr": "1"}


def test_the_notice_comes_again(monkeypatch, capfd):
    monkeypatch.setenv("INSTEP_ARRIVAL_NOTICE", "0")
    said = []

    def twice():
        said.append(capfd.readouterr().err)
        return "".join(said).count("for rank 0 of 2 to arrive") >= 2 or None

    assert ArrivalWait(2, 60).until(twice)
