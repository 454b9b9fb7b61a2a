"""A plugin of pytest: which tests run, in which order and how long; what became of each."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest


class Recording:
    """Writes a line of JSON per test into the job's record.

    The job may name the `tests` that are to run, in their order, each with a limit in seconds, and
    the mapping into which the copy's statements write when they are reached (`touched`).
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._tests: dict[str, float] | None = job.get("tests")
        self._record = Path(job["record"]).open("a")  # noqa: SIM115
        self._touched: mmap.mmap | None = None
        if "touched" in job:
            with Path(job["touched"]).open("r+b") as file:
                self._touched = mmap.mmap(file.fileno(), 0)
        self._began = 0.0
        self._outcomes: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the tests that are asked for, in the order asked for."""
        if self._tests is None:
            return
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self._tests if name in found]
        for item in items:
            item.add_marker(pytest.mark.timeout(self._tests[item.nodeid]), append=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of tests that cannot be imported is a failure too."""
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0})

    def pytest_runtest_logstart(self) -> None:
        """A test begins."""
        self._began = time.monotonic()
        self._outcomes = []
        if self._touched is not None:
            self._touched[:] = bytes(len(self._touched))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of the test has ended."""
        self._outcomes.append(report.outcome)
        if report.failed:
            text = str(report.longrepr).strip().splitlines()
            self._outcomes.append("timed out" if "Timeout" in (text or [""])[-1] else "failed")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        line: dict[str, Any] = {"test": nodeid, "seconds": time.monotonic() - self._began}
        for outcome in ("timed out", "failed", "skipped", "passed"):
            if outcome in self._outcomes:
                line["outcome"] = outcome
                break
        if self._touched is not None:
            line["sites"] = [at for at, byte in enumerate(self._touched[:]) if byte]
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self._record.write(json.dumps(line) + "\n")
        self._record.flush()
