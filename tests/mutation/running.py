"""Copies in which pytest is kept ready to run, and work for all of them from one queue."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from trees import Tree

Work = TypeVar("Work")
ALWAYS = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not nightly"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


class Runner:
    """One copy and its process that forks runs of pytest."""

    def __init__(self, folder: Path) -> None:
        self.tree = Tree(folder)
        self.tree.make()
        self._log = (folder / "zygote.log").open("w")
        here = Path(__file__).parent
        self._zygote = subprocess.Popen(
            [self.tree.python, here / "zygote.py"],
            cwd=folder,
            env=self.tree.environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._zygote.stdout is not None
        assert self._zygote.stdout.readline() == "ready\n", (folder / "zygote.log").read_text()

    def run(
        self, arguments: Iterable[str], limit: float, **more: Any
    ) -> tuple[int | None, list[dict[str, Any]]]:
        """Run pytest; its status (None: stopped at the limit) and the tests' records."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        record = self.tree.folder / "record.jsonl"
        record.write_text("")
        job = {
            "arguments": [*ALWAYS, *arguments],
            "log": str(self.tree.folder / "pytest.log"),
            "record": str(record),
            "limit": limit,
            "environ": {},
        }
        self._zygote.stdin.write(json.dumps(job | more) + "\n")
        self._zygote.stdin.flush()
        answer = self._zygote.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self.tree.folder} has ended: see its zygote.log")
        self.tree.sweep()
        lines = record.read_text().splitlines()
        return json.loads(answer), [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the process and remove the copy."""
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        self._log.close()
        shutil.rmtree(self.tree.folder, ignore_errors=True)


def each(runners: list[Runner], work: Iterable[Work], do: Callable[[Runner, Work], None]) -> None:
    """Do all the work, each piece on the runner that is free first."""
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for piece in work:
        waiting.put(piece)
    wrong: list[BaseException] = []

    def go_on(runner: Runner) -> None:
        try:
            while not wrong:
                do(runner, waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=go_on, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
