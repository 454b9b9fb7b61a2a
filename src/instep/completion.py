"""`instep completion` on the command line: a script that completes instep's words in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPLETION = """\
Print a script that completes the commands and options of instep in this shell.

bash: add this line to ~/.bashrc
    source <(instep completion bash)
zsh: add this line to ~/.zshrc, after compinit
    source <(instep completion zsh)
fish: run this once
    instep completion fish > ~/.config/fish/completions/instep.fish
"""


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    names: tuple[str, ...]
    help: str
    """The first line of its help."""
    values: tuple[str, ...]
    """The words that it takes; empty if it takes any word, or none."""
    takes_value: bool


@dataclass(frozen=True)
class Command:
    """A command of instep."""

    help: str
    options: tuple[Option, ...]
    values: tuple[str, ...]
    """The words that it takes besides; empty if it takes files."""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`, which have those of all other commands by now."""
    parser = commands.add_parser(
        "completion",
        help="complete commands and options in a shell",
        description=COMPLETION,
    )
    parser.set_defaults(subparsers=commands)
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell")


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Print the script and return the exit code."""
    print(SHELLS[asked.shell](read_commands(asked.subparsers)), end="")
    return 0


def read_commands(subparsers: Any) -> dict[str, Command]:
    """The commands that these subparsers (`argparse.ArgumentParser.add_subparsers`) have."""
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return {name: _read(parser, helps[name]) for name, parser in subparsers.choices.items()}


def _read(parser: argparse.ArgumentParser, text: str) -> Command:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = tuple(
        Option(
            tuple(action.option_strings),
            (action.help or "").partition("\n")[0].replace("%%", "%"),
            _words(action.choices),
            action.nargs != 0,
        )
        for action in shown
        if action.option_strings
    )
    named = [word for a in shown if not a.option_strings for word in _words(a.choices)]
    return Command(text, options, tuple(named))


def _words(choices: Iterable[Any] | None) -> tuple[str, ...]:
    return tuple(map(str, choices or ()))


def bash_script(commands: Mapping[str, Command]) -> str:
    """Completion for bash: options up to the script's name, then files."""
    rows = []
    for name, command in commands.items():
        known = " ".join(word for option in command.options for word in option.names)
        valued = " ".join(
            word for option in command.options if option.takes_value for word in option.names
        )
        rows.append(
            f"    {name}) options={shlex.quote(known)} valued={shlex.quote(valued)}"
            f" values={shlex.quote(' '.join(command.values))};;"
        )
    values = [
        f"    {shlex.quote(f'{name} {word}')}) "
        f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(option.values))} -- "$word")); return;;'
        for name, command in commands.items()
        for option in command.options
        if option.values
        for word in option.names
    ]
    return f"""\
_instep() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options= valued= values= at
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join([*commands, "help", "--version", "--help"]))} \
-- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{chr(10).join(rows)}
  esac
  for ((at = 2; at < COMP_CWORD; at++)); do
    case ${{COMP_WORDS[at]}} in
      -*) [[ " $valued " == *" ${{COMP_WORDS[at]}} "* ]] && at=$((at + 1));;
      *) return;;  # the script's name: what follows is the script's
    esac
  done
  if [ "$at" -gt "$COMP_CWORD" ]; then
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{chr(10).join(values)}
    esac
    return
  fi
  COMPREPLY=($(compgen -W "$values $([[ $word == -* ]] && echo "$options")" -- "$word"))
}}
complete -o bashdefault -o default -F _instep instep
"""


def zsh_script(commands: Mapping[str, Command]) -> str:
    """Completion for zsh: that of bash, by zsh's own emulation."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash_script(commands)


def fish_script(commands: Mapping[str, Command]) -> str:
    """Completion for fish, with the first line of each help."""
    lines = []
    for name, command in commands.items():
        first = "complete -c instep -n __fish_use_subcommand"
        lines.append(f"{first} -a {name} -d {_fish_quote(command.help)}")
        place = f"complete -c instep -n '__fish_seen_subcommand_from {name}'"
        if command.values:
            lines.append(f"{place} -f -a {_fish_quote(' '.join(command.values))}")
        for option in command.options:
            words = " ".join(map(_fish_name, option.names))
            takes = " -r" * option.takes_value
            if option.values:
                takes = f" -x -a {_fish_quote(' '.join(option.values))}"
            lines.append(f"{place} {words}{takes} -d {_fish_quote(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_name(word: str) -> str:
    if word.startswith("--"):
        return f"-l {word[2:]}"
    return f"-s {word[1:]}" if len(word) == 2 else f"-o {word[1:]}"


def _fish_quote(text: str) -> str:
    """In single quotes, in which fish reads only a backslash and a quote specially."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, Callable[[Mapping[str, Command]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
"""What writes the script of each shell."""
