"""What a process has after many meetings is what it had after one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launch

CYCLES = """
import torch, psutil
import torch.distributed as dist
import instep

me = psutil.Process()
def has():
    with open("/proc/self/maps") as maps:
        shared = sum("/dev/shm" in line or "memfd" in line for line in maps)
    lists = [os.listdir(f"/proc/self/{kind}") for kind in ("fd", "task")]
    return [*map(len, lists), len(me.children()), shared]
def cycle(begin):
    begin()
    instep.all_reduce(torch.ones(2))
    watchers = [child.pid for child in me.children()]
    dist.destroy_process_group()
    return watchers, has()
times = int(sys.argv[1])
ways = [instep.init] * times + [lambda: dist.init_process_group("gloo")] * times
watchers, had = zip(*map(cycle, ways))
early, late = (list(zip(*some)) for some in (had[2:4], had[-2:]))
stays = all(min(b) <= max(a) for a, b in zip(early, late))  # Gloo closes a socket late at times
tell(rank, stays or had, len({*map(tuple, watchers)}), {*map(len, watchers)} == {1})
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize(
    "times", [4, pytest.param(500, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_meetings_leave_nothing_and_each_is_watched(launch: Launch, times: int) -> None:
    """A process group may have the id of one before it."""
    ended = launch.run("-n", 2, launch.script(CYCLES), times)
    assert ended.returncode == 0, ended.stderr
    assert launch.events(2) == [[rank, True, 2 * times, True] for rank in range(2)]
