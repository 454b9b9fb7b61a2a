"""The tables of docs/suites.md and docs/design/suites.md, from benchmarks/results/suites.json."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from suites import OURS, ROOT, SUITES, Suite

RESULTS = ROOT / "benchmarks" / "results" / "suites.json"
REASONS = Path(__file__).with_name("reasons.json")
PAGES = {
    language: [ROOT / "docs" / name, ROOT / "docs" / "design" / name]
    for language, name in (("en", "suites.md"), ("zh", "suites.zh.md"))
}
"""The pages in each language; a table is on the page that has its marks."""
WORDS = {
    "en": {
        "head": "| suite | ranks | on | pass | fail | skip "
        "| groups in shared memory | other groups | version, date |",
        "own": "the tests' own",
        "differences": "| suite | ranks | test | instep | original | reason |",
        "none": "none",
        "unknown": "not known: ",
    },
    "zh": {
        "head": "| 套件 | 进程数 | 后端 | 通过 | 失败 | 跳过 "
        "| 共享内存的组 | 其他的组 | 版本与日期 |",
        "own": "由测试自定",
        "differences": "| 套件 | 进程数 | 测试 | instep | 原版 | 原因 |",
        "none": "无",
        "unknown": "未知：",
    },
}
RULE = re.compile(r"[^|]+")


def read_results() -> dict[str, Any]:
    """Every run's outcomes, by suite, ranks and side."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_pages() -> None:
    """Write the tables of all pages."""
    results = read_results()
    for language, pages in PAGES.items():
        for mark, lines in (
            ("summary", summary(results, language)),
            ("differences", differences(results, language)),
        ):
            table = "\n".join(lines)
            for page in pages:
                text = re.sub(
                    rf"(?s)(<!-- {mark} -->\n).*?(<!-- end -->)",
                    lambda found, table=table: f"{found[1]}{table}\n{found[2]}",
                    page.read_text(),
                )
                page.write_text(text)


def rows(results: dict[str, Any]) -> list[tuple[Suite, str, dict[str, Any]]]:
    """Suite, ranks and the sides, in the order of the table."""
    return [
        (suite, size, results[suite.name][size])
        for suite in SUITES
        for size in sorted(results.get(suite.name, {}), key=int)
    ]


def summary(results: dict[str, Any], language: str) -> list[str]:
    """A line for each suite, number of ranks and side."""
    words = WORDS[language]
    lines = [words["head"], RULE.sub("---", words["head"])]
    for suite, size, sides in rows(results):
        for side, run in sides.items():
            counts = Counter(text.partition(":")[0] for text in run["tests"].values())
            groups = Counter(run["groups"])
            shared = groups.pop("shared memory", 0)
            ranks = words["own"] if size == "0" else size
            cells = [suite.title, ranks, side, counts["pass"], counts["fail"], counts["skip"]]
            cells += [shared, groups.total()] if run["groups"] else ["-", "-"]
            cells.append(f"{run['version']}, {run['date']}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def differences(results: dict[str, Any], language: str) -> list[str]:
    """A line for each test that does not end on ours as on the original, or fails on ours.

    Those that fail on both and have no reason of their own share the one named "*", and those that
    fail on the original only the one named "original".
    """
    words = WORDS[language]
    reasons = json.loads(REASONS.read_text())
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for suite, size, sides in rows(results):
        ours = sides.get(OURS, {"tests": {}})["tests"]
        beside = next((run["tests"] for side, run in sides.items() if side != OURS), {})
        for test, text in sorted(ours.items()):
            outcome, _, said = text.partition(": ")
            theirs, _, said_there = beside.get(test, "-").partition(": ")
            if outcome == "fail" or (theirs != "-" and outcome != theirs):
                known = reasons.get(suite.name, {})
                shared = ("*" if outcome == "fail" else "original") if theirs == "fail" else ""
                row = known.get(test) or known.get(shared, {})
                said = (said or said_there).replace("|", "/").replace("`", "")
                reason = row.get(language) or f"{words['unknown']}`{said}`"
                ranks = words["own"] if size == "0" else size
                key = (suite.title, test, f"{outcome} | {theirs}", reason)
                found.setdefault(key, []).append(ranks)
    lines = [words["differences"], RULE.sub("---", words["differences"])]
    together: dict[tuple[str, str, str, str], list[str]] = {}
    for (title, test, outcomes, reason), sizes in found.items():
        together.setdefault((title, ", ".join(sizes), outcomes, reason), []).append(f"`{test}`")
    for (title, ranks, outcomes, reason), tests in together.items():
        lines.append(f"| {title} | {ranks} | {', '.join(tests)} | {outcomes} | {reason} |")
    return lines if found else [words["none"]]
