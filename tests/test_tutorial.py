"""docs/tutorial.md and its Chinese twin: every block is run, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import components
from pool import run
from test_same_under import environment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("tutorial.md", "tutorial.zh.md")]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
RANKS = 3


def blocks(page, language):
    """Of each block of a language: (what it holds, what the page says that it prints, or "")."""
    found = FENCED.findall(page.read_text())
    return [(code, shown) for kind, code, shown in found if kind == language]


def test_both_languages_hold_the_same_blocks_pictures_and_sections():
    english, chinese = (page.read_text() for page in PAGES)
    for pattern in (
        FENCED,
        re.compile(r"\]\(([^)]*(?:svg|py|png))\)"),
        re.compile(r"^(#+) ", re.M),
    ):
        assert pattern.findall(english) == pattern.findall(chinese) != []


@pytest.mark.slow
def test_every_block_of_python_prints_what_the_page_shows():
    shown = blocks(PAGES[0], "python")
    assert len(shown) == 7
    for code, expected in shown:
        printed = {line for told in run(RANKS, printed_by, code) for line in told.splitlines()}
        assert sorted(printed) == sorted(expected.splitlines()), code


def printed_by(code):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(code, {"__name__": "__main__"})
    return told.getvalue()


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.timeout(400)
@components.needs("Open MPI", "Slurm")
def test_every_command_prints_what_the_page_shows(tmp_path, cluster):
    """Up to the numbers; what is the same in the page is the same here."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = environment(tmp_path, PATH=path, GLOO_SOCKET_IFNAME="lo", **cluster.environ)
    told |= {"HOME": str(tmp_path), "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    before, seen = "", {}
    for code, expected in blocks(PAGES[0], "sh"):
        runnable = "\n".join(line for line in code.splitlines() if not line.startswith("sbatch"))
        ran = subprocess.run(
            ["sh", "-e", "-c", before + runnable],
            env=told, cwd=tmp_path, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        if expected:
            assert numberless(ran.stdout) == numberless(expected), code
            seen.setdefault(last(expected), set()).add(last(ran.stdout))
        kept = [line for line in code.splitlines() if line.startswith(("cd ", "export "))]
        before += "".join(f"{line}\n" for line in kept)
    assert all(len(results) == 1 for results in seen.values()), seen


def numberless(text):
    return re.sub(r"\d+(\.\d+)?", "#", text)


def last(text):
    return text.splitlines()[-1]
