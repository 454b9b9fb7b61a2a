"""Rules, and findings: the places where a rule applies."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from instep.check.script_info import RuleScope, ScriptInfo


class Severity(StrEnum):
    """The severity of a mistake."""

    ERROR = "error"
    """Wrong numbers, a hang, a crash or a lost file."""
    WARNING = "warning"
    """Slower, fragile, or different from run to run."""


@dataclass(frozen=True)
class Hit:
    """A place that a rule has found, and three sentences about it."""

    node: ast.AST
    """The place: its line and column are reported."""
    message: str
    """What the script does here."""
    effect: str
    """What happens, and from which number of processes N on."""
    mend: str
    """The correct code, one or several lines."""


CheckFunction = Callable[[ScriptInfo], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """One mistake of parallel training. Made by the decorator `rule`."""

    code: str
    """INS and three digits; the first digit is the theme."""
    name: str
    """The same in words: `set-epoch-forgotten`."""
    severity: Severity
    sentence: str
    """The rule in one sentence."""
    page: str
    """Its documentation in Markdown: what happens, a bad and a good example."""
    check: CheckFunction
    scope: RuleScope


def rule(
    code: str, severity: Severity, sentence: str, scope: RuleScope = RuleScope.PROCESSES
) -> Callable[[CheckFunction], Rule]:
    """Make a Rule of a function that yields hits.

    The function's name is the rule's, its docstring is the rule's page.
    """

    def make(check: CheckFunction) -> Rule:
        name = check.__name__.strip("_").replace("_", "-")
        page = inspect.cleandoc(check.__doc__ or "")
        return Rule(code, name, severity, sentence, page, check, scope)

    return make


@dataclass(frozen=True, order=True)
class Finding:
    """One hit of one rule in one file, as it is reported."""

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


TAKE_MEAN = (
    "mean = instep.Mean()  # or instep.Accuracy()\n"
    "mean.update(value, len(x))  # in the loop\n"
    "mean.compute()  # on every rank"
)
COUNT_HITS = (
    "accuracy = instep.Accuracy()\n"
    "accuracy.update(output, y)  # in the loop\n"
    "(top1,) = accuracy.compute()  # on every rank"
)
"""What several rules advise for what a rank has added up of its own rows."""
