"""`instep completion`: what the shells make of its scripts."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

import pytest

import components
from instep import cli


@pytest.fixture(scope="module")
def scripts():
    words = [sys.executable, "-m", "instep", "completion"]
    return {
        shell: subprocess.run([*words, shell], capture_output=True, text=True, check=True).stdout
        for shell in ("bash", "zsh", "fish")
    }


def in_bash(script, line):
    """What bash offers for the last word of this line."""
    words = shlex.split(line) + [""] * line.endswith(" ")
    setting = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}"
    asked = f'{script}\n{setting}; _instep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def in_fish(script, line):
    asked = f"{script}\ncomplete -C {shlex.quote(line)}"
    done = subprocess.run(["fish", "-N", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [offer.partition("\t")[0] for offer in done.stdout.splitlines()]


SHELLS = [
    pytest.param("bash", in_bash, id="bash"),
    pytest.param("fish", in_fish, id="fish", marks=components.needs("fish")),
]


@pytest.mark.parametrize(("shell", "offers"), SHELLS)
def test_commands_options_and_values_are_offered(scripts, shell, offers):
    def asked(line):
        return offers(scripts[shell], line)

    assert {*cli.COMMANDS} <= {*asked("instep ")}
    assert asked("instep ver") == ["verify"]
    assert {"--load", "--plain", "--max-restarts"} <= {*asked("instep run -n 2 --")}
    assert "--load" not in asked("instep verify --")
    assert {*asked("instep run --load ")} == {"auto", "own", "whole"}
    assert asked("instep completion f") == ["fish"]


def test_what_follows_the_script_is_left_to_the_script(scripts):
    assert in_bash(scripts["bash"], "instep run -n 2 train.py --") == []
    assert "--plain" in in_bash(scripts["bash"], "instep run -n 2 --pl")
    assert in_bash(scripts["bash"], "instep run --output pl") == []
    assert in_bash(scripts["bash"], "instep run --plain train.py --") == []


def test_every_option_of_every_command_is_offered(scripts):
    for name in cli.COMMANDS:
        parser = cli._parser(name).commands.choices[name]
        shown = [a.option_strings for a in parser._actions if a.help != argparse.SUPPRESS]
        options = {word for words in shown for word in words}
        assert {*in_bash(scripts["bash"], f"instep {name} -")} == options, name


@components.needs("zsh")
def test_zsh_defines_the_completion(scripts):
    asked = f"autoload -U compinit && compinit -D -u\n{scripts['zsh']}\necho $_comps[instep]"
    done = subprocess.run(["zsh", "-fc", asked], capture_output=True, text=True, check=True)
    assert "_bash_complete" in done.stdout
    assert "_instep" in done.stdout
    assert done.stderr == ""
