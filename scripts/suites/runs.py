"""Start the workers of a suite, and go on after a test that kills or blocks its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep, time
from typing import Any

SILENCE = 150.0
"""Seconds without an outcome after which a test counts as blocked."""
WORST = ("pass", "skip", "fail")
Outcome = dict[str, Any]


def run_tests(command: Sequence[object], environment: Mapping[str, str], files: list[Path]) -> None:
    """Run the command, again and again, until it ends by itself with no test left.

    `files`: the outcomes that it writes, one for each rank.
    """
    log = files[0].with_suffix(".log")
    while True:
        before = sum(map(count_lines, files))
        done = files[0].with_suffix(".done")
        done.write_text(json.dumps(sorted({line["test"] for f in files for line in read_lines(f)})))
        with log.open("a") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, **environment, "SUITE_DONE": str(done)},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        reason = wait_or_end(process, files)
        died = [note_unfinished(file, reason) for file in files]
        if not any(died) or sum(map(count_lines, files)) == before:
            return


def wait_or_end(process: subprocess.Popen[bytes], files: list[Path]) -> str:
    """Wait for the process; end it where no rank writes anything any more. Returns how it ended."""
    began = time()
    while process.poll() is None:
        sleep(0.2)
        last = max([began, *(file.stat().st_mtime for file in files if file.exists())])
        if time() - last > SILENCE:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end within {SILENCE:.0f} s"
    return f"the process ended with status {process.returncode}"


def note_unfinished(file: Path, reason: str) -> bool:
    """Add an outcome for a test that was started and has none; whether there was one."""
    lines = read_lines(file)
    if not lines or "outcome" in lines[-1]:
        return False
    outcome = {"test": lines[-1]["test"], "outcome": "fail", "reason": reason, "groups": {}}
    with file.open("a") as opened:
        opened.write(json.dumps(outcome) + "\n")
    return True


def read_outcomes(files: Sequence[Path]) -> dict[str, Outcome]:
    """Each test's outcome: the worst over the ranks."""
    outcomes: dict[str, Outcome] = {}
    for file in files:
        for line in read_lines(file):
            if "outcome" not in line:
                continue
            seen = outcomes.get(line["test"])
            if seen is None or WORST.index(line["outcome"]) > WORST.index(seen["outcome"]):
                outcomes[line["test"]] = line
    return outcomes


def count_groups(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """How many groups of each class the processes of all tests made."""
    total: Counter[str] = Counter()
    for each in outcomes.values():
        total.update(each["groups"])
    return dict(sorted(total.items()))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of outcomes."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def count_lines(file: Path) -> int:
    """How many lines it has."""
    return len(read_lines(file))
