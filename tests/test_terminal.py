"""What is typed at rank 0's terminal is read by an unedited script on every rank."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from instep.unedited.std_streams import StdStreams, Terminal
from test_unedited_world import RUN, Place

pytestmark = pytest.mark.slow

SCRIPT = """
    import os, sys
    from view import view

    seen = [input("name? "), os.read(0, 100).decode(), sys.stdin.readline(), os.isatty(0)]
    seen += [tuple(os.get_terminal_size(0)), os.isatty(1)]
    try:
        input()
    except EOFError as error:
        seen.append("no more")
    view(seen)
    print(seen)
"""
TYPED = b"Ada\nread as it is\nby the line\n\x04"


def at_a_terminal(place, name, *command):
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
        os.write(ours, TYPED)
        for made in (name, f"{name}-views"):
            (place.folder / made).mkdir()
        return subprocess.run(
            [*command, str(place.folder / f"{name}-views")],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
            cwd=place.folder / name,
        )
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.launch
def test_what_is_typed_reaches_every_rank(tmp_path):
    place = Place(tmp_path)
    script = place.script(SCRIPT)
    plain = at_a_terminal(place, "plain", sys.executable, script)
    done = at_a_terminal(place, "n2", *RUN, "2", script)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    seen = ["Ada", "read as it is\n", "by the line\n", True, [77, 24], False, "no more"]
    assert place.views("n2") == [seen, seen]


ASKS_IN_A_THREAD = """
    import threading
    from view import view

    def ask():
        try:
            seen.append(input("name? "))
        except EOFError as error:
            seen.append(str(error))

    seen = []
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    view(seen)
"""


@pytest.mark.launch
def test_what_a_thread_asks_for_reaches_rank_0_alone(tmp_path):
    place = Place(tmp_path)
    done = at_a_terminal(place, "n2", *RUN, "2", place.script(ASKS_IN_A_THREAD))
    assert (done.returncode, done.stdout) == (0, "name? "), done.stderr
    assert place.views("n2") == [["Ada"], ["EOF when reading a line"]]


MUTED = """
import sys
from instep.unedited.std_streams import StdStreams, Terminal

streams = StdStreams(int(sys.argv[1]), Terminal.detect(), None)
print("before")
print("before", file=sys.stderr)
streams.install()
print("meanwhile")
print("meanwhile", file=sys.stderr)
streams.restore()
print("after")
print("after", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("rank", "heard"),
    [
        (0, ["before", "meanwhile", "after"]),
        pytest.param(1, ["before", "after"], marks=pytest.mark.nightly),
    ],
)
def test_of_another_rank_nothing_is_heard_meanwhile(rank, heard):
    """Whatever is still in a buffer."""
    done = subprocess.run(
        [sys.executable, "-c", MUTED, str(rank)], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr.split()) == (heard, heard)


def test_a_process_without_standard_streams_is_restored():
    streams = StdStreams(1, Terminal.detect(), None)
    streams._saved = [os.dup(fd) for fd in range(3)]
    with pytest.MonkeyPatch.context() as patched:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            patched.setattr(sys, name, None)
        streams.restore()
    assert streams._saved == []


def test_rank_0_ends_though_nobody_reads_its_output_any_more():
    class Broken:
        def flush(self):
            raise BrokenPipeError

    streams = StdStreams(0, Terminal.detect(), None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", Broken())
        patched.setattr(sys, "stdin", None)
        streams.restore()
        assert sys.stdin is streams._stdin
