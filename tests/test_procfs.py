"""Processes by their address: whether one of this host still runs."""

import os
import subprocess

from instep.process.procfs import ProcessHandle, process_address


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
