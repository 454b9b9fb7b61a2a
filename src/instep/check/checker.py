"""From files to findings: read, ask every rule, leave out what the script waves away."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from instep.check.facts import Facts
from instep.check.finding import Finding, Hit, Rule, Severity
from instep.check.rules import RULES
from instep.check.script import Script

_IGNORE = re.compile(r"#\s*instep:\s*ignore(?:\[([A-Z0-9,\s]*)\])?")


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be checked."""

    path: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What came of checking some files."""

    checked: tuple[str, ...]
    findings: tuple[Finding, ...]
    unreadable: tuple[Unreadable, ...]


def check_files(paths: Iterable[str], rules: Collection[Rule] = tuple(RULES.values())) -> Outcome:
    """Check each file by these rules. Files are read, never run.

    A file that cannot be read or parsed is named in the outcome; the others are checked.
    """
    checked: list[str] = []
    findings: list[Finding] = []
    unreadable: list[Unreadable] = []
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
            found = check_text(path, text, rules)
        except OSError as error:
            unreadable.append(Unreadable(path, error.strerror or str(error)))
        except SyntaxError as error:
            unreadable.append(Unreadable(path, f"line {error.lineno}: {error.msg}"))
        except (ValueError, RecursionError) as error:
            unreadable.append(Unreadable(path, str(error)))
        else:
            checked.append(path)
            findings += found
    return Outcome(tuple(checked), tuple(sorted(findings)), tuple(unreadable))


def check_text(path: str, text: str, rules: Collection[Rule]) -> list[Finding]:
    """The findings in one script, in the order of its lines. Raises SyntaxError."""
    script = Script(path, text)
    facts = Facts(script)
    found = {
        _finding(script, asking, hit)
        for asking in rules
        if asking.scope in facts.scopes
        for hit in asking.check(facts)
        if not _ignored(script, hit.node, asking.code)
    }
    return sorted(found)


def severe_findings(path: str) -> list[Finding]:
    """What is wrong for sure in one script: findings of severity error. For `instep run`.

    A script that cannot be read or parsed has none: whoever runs it will see why.
    """
    rules = [r for r in RULES.values() if r.severity is Severity.ERROR]
    return list(check_files([path], rules).findings)


def chosen(select: Collection[str], ignore: Collection[str]) -> list[Rule]:
    """The rules whose code begins with one of `select` (all, if empty) and none of `ignore`."""
    return [
        found
        for code, found in RULES.items()
        if (not select or code.startswith(tuple(select)))
        and not (ignore and code.startswith(tuple(ignore)))
    ]


def _finding(script: Script, asking: Rule, hit: Hit) -> Finding:
    line: int = getattr(hit.node, "lineno", 1)
    before = script.lines[line - 1].encode()[: getattr(hit.node, "col_offset", 0)]
    return Finding(
        path=script.path,
        line=line,
        column=len(before.decode(errors="replace")) + 1,
        code=asking.code,
        name=asking.name,
        severity=asking.severity,
        message=hit.message,
        effect=hit.effect,
        mend=hit.mend,
    )


def _ignored(script: Script, node: ast.AST, code: str) -> bool:
    """Whether its first or last line ends in `# instep: ignore` or `# instep: ignore[CODE, …]`."""
    first: int = getattr(node, "lineno", 1)
    last: int = getattr(node, "end_lineno", None) or first
    for line in {first, last}:
        found = _IGNORE.search(script.lines[line - 1])
        if found is None:
            continue
        codes = found.group(1)
        if codes is None or code in {given.strip() for given in codes.split(",")}:
            return True
    return False
