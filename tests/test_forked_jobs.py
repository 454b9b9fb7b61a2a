"""A job of forked_jobs.py is to its script what a started one is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked_jobs

FACTS = """
import gc, json, os, signal, sys, threading
import torch
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited import session

facts = {
    "argv": sys.argv,
    "environ": {name: os.environ[name] for name in os.environ if name != "INSTEP_JOB"},
    "folder": os.getcwd(),
    "leader": os.getsid(0) == os.getpid(),
    "main": [__name__, __file__],
    "path": sys.path,
    "line": sys.stdin.readline(),
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "threads": [threading.active_count(), torch.get_num_threads()],
    "signals": [str(signal.getsignal(n)).split(" at ")[0] for n in range(1, 32)],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "frozen": gc.get_freeze_count() > 100_000,
    "order": list(set("abcdefgh")),
    "random": torch.initial_seed(),
    "compiler": "torch._dynamo" in sys.modules,
}
class Deleted:
    def __del__(self):
        print("deleted at the end")
kept = Deleted()
with bypass_overlay(), open(f"{sys.argv[1]}.{session.current().world.rank}", "w") as file:
    json.dump(facts, file, indent=1)
print("to stdout")
print("to stderr", file=sys.stderr)
if sys.argv[2:]:
    raise ValueError(*sys.argv[2:])
"""


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize("failing", [[], ["not like this"]])
def test_it_has_the_environment_the_streams_and_the_end_of_one_that_is_started(
    tmp_path: Path, failing: list[str]
) -> None:
    (tmp_path / "train.py").write_text(FACTS)
    words = ["run", "-n", "2", "train.py", "facts", *failing]
    environ = os.environ | {"INSTEP_SEED": "7", "OMP_NUM_THREADS": "1"}
    told: dict[str, Any] = {"cwd": tmp_path, "env": environ, "input": "a line\n"}
    started = subprocess.run(
        [sys.executable, "-m", "instep", *words], capture_output=True, text=True, **told
    )
    facts = [json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in (0, 1)]
    forked = forked_jobs.run(*words, **told)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr == started.stderr
    assert [json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in (0, 1)] == facts


def test_one_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal\nprint('begun')\nsignal.pause()\n")
    with pytest.raises(TimeoutError):
        forked_jobs.run("run", "--plain", "-n", "2", "train.py", cwd=tmp_path, timeout=1)
    ended = forked_jobs.run("run", "--plain", "-n", "1", "train.py", cwd=tmp_path / "..")
    assert "there is no such file" in ended.stderr


def test_variables_that_an_interpreter_reads_when_it_starts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="an interpreter that starts"):
        forked_jobs.run("run", "train.py", env=os.environ | {"PYTHONPATH": str(tmp_path)})
