"""Commands that an unedited script starts run once, and every rank sees what came of them."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

import file_cases
import forked_jobs

SCRIPTS = [script for script in file_cases.scripts() if file_cases.can_run(script)]


def unlike(scripts: list[file_cases.Script], ranks: int) -> dict[str, list[str]]:
    """What differs from plain Python."""
    found = file_cases.table(scripts, ranks)
    assert len(found) == len(scripts) > 0
    return {name: differences for name, differences in found.items() if differences}


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_files_and_commands_are_as_in_one_process() -> None:
    assert unlike([script for script in SCRIPTS if script.fast][::8], 2) == {}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3])
def test_files_and_commands_of_every_kind_are_as_in_one_process(ranks: int) -> None:
    assert unlike(SCRIPTS, ranks) == {}


def launched(folder: Path, text: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(text))
    told = os.environ | {"TMPDIR": str(folder)}
    return forked_jobs.run("run", "-n", str(ranks), "train.py", cwd=folder, env=told)


@pytest.mark.launch
@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_what_commands_say_does_not_stay_in_memory(tmp_path: Path) -> None:
    """41 answers of 5 MB took 209 MB on rank 0, which keeps the store."""
    done = launched(
        tmp_path,
        """
        import json, subprocess
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        def ask():
            command = "yes 0123456789abcde | head -c 5000000"
            assert len(subprocess.check_output(command, shell=True)) == 5000000
        for _ in range(3):
            ask()
        before = resident()
        for _ in range(20):
            ask()
        print(json.dumps(resident() - before))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 30 << 20


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_what_cannot_be_done_once_is_said(tmp_path: Path) -> None:
    done = launched(
        tmp_path,
        """
        import asyncio, os, select, subprocess
        def words(call):
            try:
                call()
            except Exception as error:
                print(type(error).__name__, error)
        def by_pipe():
            reading, writing = os.pipe()
            subprocess.run("echo x", shell=True, stdout=writing)
        def by_selecting():
            with subprocess.Popen("echo x", shell=True, stdout=subprocess.PIPE) as command:
                select.select([command.stdout], [], [])
        async def by_asyncio():
            await asyncio.create_subprocess_shell("echo x >> twice")
        words(by_pipe)
        words(by_selecting)
        words(lambda: asyncio.run(by_asyncio()))
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pipe, select, asyncio = done.stdout.splitlines()
    assert "gives a command a pipe or a socket of its own" in pipe
    assert "the file descriptor of a command's stream" in select
    assert "starts commands by asyncio" in asyncio
    assert not (tmp_path / "twice").exists()


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_what_only_one_rank_has_outlives_a_command(tmp_path: Path) -> None:
    """A time in a run's name differs between ranks."""
    done = launched(
        tmp_path,
        """
        import os, subprocess
        name = f"run-{os.getpid()}"
        os.makedirs(f"runs/{name}/logs")
        log = open(f"runs/{name}/logs/log", "w", buffering=1)
        log.write("one\\n")
        for _ in range(2):
            subprocess.run("git --version >> version", shell=True, check=True)
            log.write("two\\n")
        os.chdir(f"runs/{name}")
        os.system("true")
        open("logs/more", "w").write("x")
        assert sorted(os.listdir("logs")) == ["log", "more"]
        print(open("logs/log").read())
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "one\ntwo\ntwo\n\n"
    assert (tmp_path / "version").read_text().count("git version") == 2
