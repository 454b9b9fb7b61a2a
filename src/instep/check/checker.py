"""Check files: read each one, apply the rules, leave out findings that the script ignores."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from instep.check.finding import Finding, Hit, Rule, Severity
from instep.check.rules import RULES
from instep.check.script import Script
from instep.check.script_info import ScriptInfo

_IGNORE = re.compile(r"#\s*instep:\s*ignore(?:\[([A-Z0-9,\s]*)\])?")


@dataclass(frozen=True)
class FileReadError:
    """A file that could not be checked."""

    path: str
    reason: str


@dataclass(frozen=True)
class CheckResult:
    """The result of checking some files."""

    checked: tuple[str, ...]
    findings: tuple[Finding, ...]
    unreadable: tuple[FileReadError, ...]


def check_files(
    paths: Iterable[str], rules: Collection[Rule] = tuple(RULES.values())
) -> CheckResult:
    """Check files by these rules. Files are read, never run.

    A file that cannot be read or parsed is listed in the result; the others are checked.
    """
    checked: list[str] = []
    findings: list[Finding] = []
    unreadable: list[FileReadError] = []
    for path in paths:
        try:
            found = check_script(Script.read(path), rules)
        except OSError as error:
            unreadable.append(FileReadError(path, error.strerror or str(error)))
        except SyntaxError as error:
            where = "" if error.lineno is None else f"line {error.lineno}: "
            unreadable.append(FileReadError(path, f"{where}{error.msg}"))
        except ValueError as error:
            unreadable.append(FileReadError(path, str(error)))
        except (RecursionError, MemoryError):  # the latter is the parser's own limit
            unreadable.append(FileReadError(path, "it is nested too deeply"))
        else:
            checked.append(path)
            findings += found
    return CheckResult(tuple(checked), tuple(sorted(findings)), tuple(unreadable))


def find_python_files(paths: Iterable[str]) -> Iterator[str]:
    """These files, and the Python files in these folders without hidden ones and environments."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for folder, below, files in os.walk(path):
            below[:] = sorted(each for each in below if not _is_left_out(folder, each))
            python = sorted(f for f in files if f.endswith(".py") and not f.startswith("."))
            yield from (os.path.join(folder, file) for file in python)


def _is_left_out(folder: str, name: str) -> bool:
    environment = os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
    return name.startswith(".") or name in ("__pycache__", "node_modules") or environment


def check_script(script: Script, rules: Collection[Rule]) -> list[Finding]:
    """The findings in one script, in the order of its lines."""
    info = ScriptInfo(script)
    found = {
        _make_finding(script, rule, hit)
        for rule in rules
        if rule.scope in info.scopes
        for hit in rule.check(info)
        if not _is_ignored(script, hit.node, rule.code)
    }
    return sorted(found)


def severe_findings(path: str) -> list[Finding]:
    """The findings of severity error in one script, for `instep run`.

    A script that cannot be read or parsed has none: running it shows the error.
    """
    rules = [r for r in RULES.values() if r.severity is Severity.ERROR]
    return list(check_files([path], rules).findings)


def select_rules(select: Collection[str], ignore: Collection[str]) -> list[Rule]:
    """The rules whose code begins with one of `select` (all, if empty) and none of `ignore`."""
    return [
        found
        for code, found in RULES.items()
        if (not select or code.startswith(tuple(select)))
        and not (ignore and code.startswith(tuple(ignore)))
    ]


def _make_finding(script: Script, rule: Rule, hit: Hit) -> Finding:
    line: int = getattr(hit.node, "lineno", 1)
    before = script.lines[line - 1].encode()[: getattr(hit.node, "col_offset", 0)]
    return Finding(
        path=script.path,
        line=line,
        column=len(before.decode(errors="replace")) + 1,
        code=rule.code,
        name=rule.name,
        severity=rule.severity,
        message=hit.message,
        effect=hit.effect,
        mend=hit.mend,
    )


def _is_ignored(script: Script, node: ast.AST, code: str) -> bool:
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
