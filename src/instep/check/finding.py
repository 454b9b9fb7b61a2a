"""What the checker says: a rule, and one place where it holds."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep.check.facts import Facts


class Severity(StrEnum):
    """How bad it is when the rule is right."""

    ERROR = "error"
    """Wrong numbers, a hang, a crash or a lost file."""
    WARNING = "warning"
    """Slower, fragile, or different from run to run."""


class Scope(StrEnum):
    """Which scripts a rule is about."""

    PROCESSES = "processes"
    """Visibly written for several processes."""
    PARALLEL = "parallel"
    """Those, and scripts with nn.DataParallel."""
    ANY = "any"


@dataclass(frozen=True)
class Hit:
    """What a rule found: where, and the three sentences about it."""

    node: ast.AST
    """The place: its line and column are reported."""
    message: str
    """What the script does here."""
    effect: str
    """What will happen, and from which number of processes N on."""
    mend: str
    """The code that mends it, one or several lines."""


Check = Callable[["Facts"], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """One thing that goes wrong in parallel. Made by the decorator `rule`."""

    code: str
    """INS and three digits; the first digit is the theme."""
    name: str
    """The same in words: `set-epoch-forgotten`."""
    severity: Severity
    sentence: str
    """The rule in one sentence."""
    page: str
    """Its documentation in Markdown: what happens, a bad and a good example."""
    check: Check
    scope: Scope


def rule(
    code: str, name: str, severity: Severity, sentence: str, scope: Scope = Scope.PROCESSES
) -> Callable[[Check], Rule]:
    """Make a Rule of a function that finds hits; the function's docstring is the page."""

    def make(check: Check) -> Rule:
        page = inspect.cleandoc(check.__doc__ or "")
        return Rule(code, name, severity, sentence, page, check, scope)

    return make


@dataclass(frozen=True, order=True)
class Finding:
    """One hit of one rule in one file, ready to be reported."""

    path: str
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""
    code: str
    name: str
    severity: Severity
    message: str
    effect: str
    mend: str
