"""Run the tests of a module in this process; each outcome is a line of a JSON file.

    python worker.py MODULE OUTCOMES [--forked]

OUTCOMES is the name of the file less the rank and .json. The tests of the list in the file that
SUITE_DONE names are left out: after a crash the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import threading
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

LENGTH = 240
FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")
"""Those of this machine, in the text of an error."""


RANKS = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def reason_of(text: str) -> str:
    """The last line of the first traceback in `text` that names an error."""
    inner = text.partition("and exception:\n")[2] or text
    lines = [
        line.strip()
        for line in inner.splitlines()
        if re.match(r"[\w.]+(Error|Exit|Exception|Warning|Interrupt)\b", line)
    ]
    return shortened((lines or [text.strip().rpartition("\n")[2]])[0])


def shortened(text: str) -> str:
    """The beginning of a text, with files by their names only."""
    return FOLDERS.sub("", text)[:LENGTH]


class RecordedResult(unittest.TestResult):
    """Writes each test's outcome as it ends: pass, fail or skip."""

    def __init__(self, file: Path, notes: Path | None) -> None:
        super().__init__()
        self.file, self.notes = file, notes
        self.is_started = False

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.is_started = True
        self.outcome, self.reason, self.began = "pass", "", monotonic()
        if self.notes:
            self.notes.write_text("")
        self.write(test=name_of(test), started=True)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        self.is_started = False
        groups = Counter(self.notes.read_text().splitlines()) if self.notes else {}
        self.write(
            test=name_of(test),
            outcome=self.outcome,
            reason=self.reason,
            groups=dict(groups),
            seconds=round(monotonic() - self.began, 2),
        )

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self.fail(test, self.errors[-1][1])

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self.fail(test, self.failures[-1][1])

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.fail(test, self._exc_info_to_string(err, test))

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        if not self.is_started:  # Python 3.12.1 does not start a test that a decorator skips
            self.startTest(test)
        if self.outcome == "pass":
            self.outcome, self.reason = "skip", shortened(reason)

    def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
        super().addUnexpectedSuccess(test)
        self.outcome, self.reason = "fail", "unexpected success"

    def fail(self, test: Any, text: str) -> None:
        print(f"--- {test}\n{text}", flush=True)
        if isinstance(test, unittest.TestCase):
            self.outcome, self.reason = "fail", reason_of(text)
        else:  # a class or module could not be set up
            self.write(test=str(test), outcome="fail", reason=reason_of(text), groups={}, seconds=0)

    def write(self, **values: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\n")


def name_of(test: unittest.TestCase) -> str:
    """Class and method."""
    return ".".join(test.id().split(".")[-2:])


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The tests of a suite, in its order."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from flat(each)
        else:
            yield each


def honour_pytest(test: unittest.TestCase) -> None:
    """Skip a test that pytest, under which its project runs it, would skip."""
    method = getattr(test, test._testMethodName, None)
    for mark in [*getattr(method, "pytestmark", ()), *getattr(type(test), "pytestmark", ())]:
        if mark.name == "skip" or (mark.name == "skipif" and mark.args and mark.args[0]):
            reason = mark.kwargs.get("reason", "")
            setattr(test, test._testMethodName, unittest.skip(reason)(lambda: None))


def load(module: str) -> ModuleType:
    """The module of that name, or in that file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module)
    sys.path[:0] = [str(path.parent)]
    return importlib.import_module(path.stem)


def stand_in_for_threads() -> None:
    """The one function of Horovod's launcher that its tests' helpers import."""

    def in_thread(target: Callable[..., None], args: Any = (), **_: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].in_thread = in_thread  # type: ignore[attr-defined]


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("outcomes")
    parser.add_argument("--forked", action="store_true")
    asked = parser.parse_args()
    sys.argv[1:] = []
    rank = next(filter(None, map(os.environ.get, RANKS)), "0")
    file = Path(f"{asked.outcomes}.{rank}.json")
    done = json.loads(Path(os.environ["SUITE_DONE"]).read_text())
    notes = os.environ.get("SUITE_NOTES")
    if notes:
        import mapped_backend

        mapped_backend.install_from_environment()
    if asked.forked:
        import forked_tests

        forked_tests.install(*([] if asked.module.endswith(".py") else [asked.module]))
    if compat := os.environ.get("SUITE_COMPAT"):
        from instep.compat import finder

        finder.install()
        if compat == "horovod":
            stand_in_for_threads()
        if compat == "jittor":
            import jittor_tensors

            jittor_tensors.install()
    if os.environ.get("SUITE_ON_CPUS"):
        import apex_on_cpus

        apex_on_cpus.install()
    result = RecordedResult(file, Path(notes) if notes else None)
    try:
        module = load(asked.module)
    except (ImportError, AttributeError) as error:
        said = shortened(f"{type(error).__name__}: {error}")
        test = f"{Path(asked.module).stem} (import)"
        result.write(test=test, outcome="fail", reason=said, groups={})
        return
    # PyTorch's refuses tests of another file than the one that was started.
    vars(module).pop("load_tests", None)
    tests = flat(unittest.defaultTestLoader.loadTestsFromModule(module))
    chosen = [test for test in tests if name_of(test) not in done]
    for test in chosen:
        honour_pytest(test)
    unittest.TestSuite(chosen).run(result)
    with contextlib.suppress(Exception):
        sys.stdout.flush()


if __name__ == "__main__":
    main()
