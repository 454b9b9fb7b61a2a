"""`instep.spawn`: from scripts and notebooks, results and failures, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import instep
from instep.errors import CannotSendError, CommandLineError, RankFailedError
from instep.launch.signals import SignalQueue, exit_on_signal

pytestmark = pytest.mark.launch


def place(local_rank, word, fail=None):
    if local_rank == fail:
        raise ValueError("boo")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    return word, local_rank, os.getpid(), [os.environ[name] for name in names]


def test_the_ranks_have_a_world_and_hand_back_what_they_return():
    ranks = instep.spawn(place, ("word",), nprocs=3)
    for rank, (word, local_rank, pid, told) in enumerate(ranks):
        assert (word, local_rank) == ("word", rank)
        assert told == [str(rank), "3", "127.0.0.1", "lo"]
        assert not psutil.pid_exists(pid)


def test_no_descriptor_is_left_open():
    def spawn():
        instep.spawn(place, ("word",), nprocs=3)
        return os.listdir("/proc/self/fd")

    spawn()
    assert len({len(spawn()) for _ in range(3)}) == 1


def test_a_function_that_takes_other_arguments_is_refused_before_a_rank_starts():
    with pytest.raises(TypeError, match=r"place: .* calls it with the local rank, and then with"):
        instep.spawn(place)
    with pytest.raises(
        TypeError, match=r"a function, not 'train\.py'\. .*: !instep run -n 2 train"
    ):
        instep.spawn("train.py", nprocs=2)
    assert instep.spawn(max, (3, 2), nprocs=1) == [3]


def test_the_traceback_of_the_rank_that_failed_is_raised_here():
    with pytest.raises(RankFailedError) as raised:
        instep.spawn(place, ("word", 1), nprocs=2)
    assert (raised.value.rank, raised.value.code) == (1, 1)
    head, *lines = str(raised.value).split("\n")
    assert head.startswith("instep: rank 1 of 2 failed (exit code 1)")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith(", in place")
    assert lines[-1] == "ValueError: boo"


def die(local_rank):
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL") as raised:
        instep.spawn(die, nprocs=2)
    assert raised.value.code == 128 + signal.SIGKILL


def give(local_rank, kind):
    return threading.Lock() if kind == "lock" else kind


def test_what_does_not_pickle_is_said():
    lock = threading.Lock()
    with pytest.raises(CannotSendError, match="give and its arguments cannot be sent to the ranks"):
        instep.spawn(give, (lock,))
    with pytest.raises(RankFailedError, match=r"what give returned cannot be sent back: .*lock"):
        instep.spawn(give, ("lock",))


def test_what_cannot_run_is_refused():
    with pytest.raises(CommandLineError, match=r"nprocs takes the number of ranks, .*, not '0'"):
        instep.spawn(place, nprocs=0)
    with pytest.raises(CommandLineError, match="a whole number from 1 up, not '2'"):
        instep.spawn(place, nprocs="2")


def test_outside_the_main_thread_too():
    found = []
    thread = threading.Thread(target=lambda: found.extend(instep.spawn(give, (7,), nprocs=2)))
    thread.start()
    thread.join()
    assert found == [7, 7]


CELLS = """
import instep, linecache

def cell(text, number):
    name = f"<cell {number}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name  # as IPython does
    exec(compile(text, name, "exec"), globals())

cell('''
class Answer:
    def __init__(self, value):
        self.value = value

def worker(rank, factor):
    if factor == 0:
        raise ValueError("boo")
    return Answer((instep.rank + 1) * factor)
''', 1)
cell('''
answers = instep.spawn(worker, (10,), nprocs=2)
print([answer.value for answer in answers], all(type(a) is Answer for a in answers))
try:
    instep.spawn(worker, (0,), nprocs=1)
except instep.InstepError as error:
    print(error)
''', 2)
"""


def test_functions_and_classes_of_a_notebook_cell(tmp_path):
    """A kernel's `__main__` has no file: so has a program that is read from a pipe."""
    ran = subprocess.run(
        [sys.executable, "-"], input=CELLS, capture_output=True, text=True, cwd=tmp_path,
        timeout=50, check=True,
    )  # fmt: skip
    first, *rest = ran.stdout.splitlines()
    assert first == "[10, 20] True"
    assert rest[-2:] == ['    raise ValueError("boo")', "ValueError: boo"]


INTERRUPTED = """
import os, signal, instep
def worker(rank):
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
before = signal.getsignal(signal.SIGINT)
try:
    instep.spawn(worker, nprocs=1)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is before)
"""


def test_a_signal_that_a_program_in_c_handles_stays_with_it(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", pytest.fail)
    with SignalQueue(), exit_on_signal():
        pass


STACKS = """
import faulthandler, os, signal, sys
import instep

def nothing(rank):
    pass

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, sys.stdout)
    instep.spawn(nothing, nprocs=1)
    os.kill(os.getpid(), signal.SIGUSR1)
    print("goes on")
"""


def test_a_signal_of_the_scripts_faulthandler_stays_with_it(tmp_path):
    path = tmp_path / "stacks.py"
    path.write_text(STACKS)
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0
    assert f'"{path}", line 11 in <module>' in ran.stdout
    assert ran.stdout.endswith("goes on\n")


def test_an_interrupt_ends_the_ranks_and_is_raised(tmp_path):
    path = tmp_path / "interrupted.py"
    path.write_text(INTERRUPTED)
    ran = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=50, check=True
    )
    assert ran.stdout == "interrupted True\n"
