"""Whether another process of this host still lives."""

import os
import subprocess

from instep.distributed.communication.peer_process import Watch, address_of_this_process


def address_of(process):
    here, _, number = address_of_this_process().rpartition(" ")
    assert int(number) == os.getpid()
    return f"{here} {process.pid}"


def test_a_process_has_ended_when_it_is_a_zombie_and_when_it_is_gone():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        watch = Watch(address_of(process))
        assert not watch.ended()
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.ended()
        process.wait()
        assert watch.ended()
        watch.close()
        assert Watch(address_of(process)).ended()


def test_a_process_of_another_host_always_seems_to_live():
    watch = Watch("elsewhere pid:[1] 1")
    assert not watch.ended()
    watch.close()
    assert not watch.ended()


def test_nobody_is_watched_any_more_after_the_end():
    before = len(os.listdir("/proc/self/fd"))
    watch = Watch(address_of_this_process())
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.close()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
