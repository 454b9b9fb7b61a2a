"""What holds for the whole test run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

import components
import slurm


def pytest_configure() -> None:
    """A shell tells what it runs in the background to ignore SIGINT, and nohup SIGHUP; the children
    must not."""
    os.environ.setdefault("INSTEP_DIVIDE", "always")  # most models here are too small to gain
    os.environ.setdefault("INSTEP_ARRIVAL_NOTICE", "100")  # no line on a slow host's start
    # A thread of OpenMP that waits for work takes no core from the other tests.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    # Unbuffered, a line of rank 0's goes out piece by piece, with other ranks' lines in between.
    os.environ.pop("PYTHONUNBUFFERED", None)
    signals = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in signals.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that needs a launcher which is not here is not run."""
    for mark in item.iter_markers("needs"):
        components.require(mark.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tested."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("not tested here")
        for reason, count in reasons.items():
            terminalreporter.line(f"{reason}: {count} test{'s' * (count != 1)}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """A Slurm of two nodes, started for the first test that asks and stopped after the last."""
    running = slurm.Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running
    finally:
        running.stop()
