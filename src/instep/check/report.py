"""The formats of the findings: text, JSON, and GitHub's annotations."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

from instep.check.checker import CheckResult
from instep.check.finding import Finding

SCHEMA = 1
"""Version of the JSON format; it grows if a key changes its meaning or is removed."""


def format_text(outcome: CheckResult) -> str:
    """Three lines per finding (place and message, effect, correct code), and a total. Files that
    could not be checked are named on stderr."""
    blocks = [_block(finding) for finding in outcome.findings]
    total = [_format_total(outcome)] if outcome.checked or not outcome.unreadable else []
    return "\n".join([*blocks, *total])


def _block(finding: Finding) -> str:
    where = f"{finding.path}:{finding.line}:{finding.column}"
    mend = finding.mend.replace("\n", "\n           ")
    return (
        f"{where}: {finding.code} {finding.severity}: {finding.message}\n"
        f"  happens: {finding.effect}\n"
        f"  instead: {mend}"
    )


def _format_total(outcome: CheckResult) -> str:
    """One line with the number of findings."""
    by_severity = Counter(finding.severity.value for finding in outcome.findings)
    files = f"{len(outcome.checked)} file{'s' * (len(outcome.checked) != 1)}"
    if not outcome.findings:
        return f"Nothing found in {files}."
    parts = [f"{n} {name}{'s' * (n != 1)}" for name, n in sorted(by_severity.items())]
    return f"{' and '.join(parts)} in {files}. More: instep check --explain CODE"


def format_json(outcome: CheckResult) -> str:
    """A stable form: schema, files, findings, unreadable, summary."""
    by_severity = Counter(finding.severity.value for finding in outcome.findings)
    return json.dumps(
        {
            "schema": SCHEMA,
            "files": list(outcome.checked),
            "findings": [asdict(finding) for finding in outcome.findings],
            "unreadable": [asdict(file) for file in outcome.unreadable],
            "summary": {name: by_severity[name] for name in ("error", "warning")},
        },
        indent=2,
    )


def format_github(outcome: CheckResult) -> str:
    """Workflow commands: GitHub shows each as an annotation of its line."""
    lines = [
        f"::{finding.severity} file={_property(finding.path)},line={finding.line},"
        f"col={finding.column},title={_property(f'{finding.code} {finding.name}')}::"
        + _escaped(f"{finding.message}\nHappens: {finding.effect}\nInstead: {finding.mend}")
        for finding in outcome.findings
    ]
    lines += [
        f"::error file={_property(file.path)}::could not be checked: {_escaped(file.reason)}"
        for file in outcome.unreadable
    ]
    return "\n".join(lines)


def _escaped(message: str) -> str:
    return message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escaped(value).replace(":", "%3A").replace(",", "%2C")
