"""Processes by their address: whether one of this host still runs."""

import os
import subprocess
import sys
from pathlib import Path

from instep.process.procfs import ProcessHandle, process_address, read_stat


def address_of(process):
    here, _, number = process_address().rpartition(" ")
    assert int(number) == os.getpid()
    return f"{here} {process.pid}"


def test_a_process_has_ended_when_it_is_a_zombie_and_when_it_is_gone():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        watch = ProcessHandle(address_of(process))
        assert not watch.has_ended()
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.has_ended()
        process.wait()
        assert watch.has_ended()
        watch.close()
        assert ProcessHandle(address_of(process)).has_ended()


def test_the_name_of_a_process_may_hold_brackets_and_spaces():
    name = Path("/proc/self/comm")
    before = name.read_text()
    try:
        name.write_text("a) S 1 (b")
        assert read_stat(os.getpid()).parent == os.getppid()
    finally:
        name.write_text(before)


def test_a_process_of_another_host_always_seems_to_live():
    watch = ProcessHandle("elsewhere pid:[1] 1")
    assert not watch.has_ended()
    watch.close()
    assert not watch.has_ended()


def test_nobody_is_watched_any_more_after_the_end():
    before = len(os.listdir("/proc/self/fd"))
    watch = ProcessHandle(process_address())
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.close()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


REPLACES = """
import os
from instep.process.procfs import replace_environ
started = open("/proc/self/environ", "rb").read()
try:
    replace_environ({"A": "y" * len(started)})
except ValueError as error:
    print(str(error).replace(str(len(started)), "all"))
assert open("/proc/self/environ", "rb").read() == started and os.environ["A"] == "x"
replace_environ({"A": "z"})
print(open("/proc/self/environ", "rb").read().strip(bytes(1)), dict(os.environ))
"""


def test_an_environment_is_replaced_where_there_is_room_for_the_new_one():
    environ = {"A": "x", "PYTHONPATH": os.pathsep.join(sys.path), "ROOM": "." * 100}
    command = (sys.executable, "-c", REPLACES)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    refused, replaced = done.stdout.splitlines()
    size = sum(len(f"{name}={value}") + 1 for name, value in environ.items())
    assert refused == f"{size + 3} bytes of variables, and room for all"
    assert replaced == "b'A=z' {'A': 'z'}"
