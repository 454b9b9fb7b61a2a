"""The documentation of the rules and of the warnings of a running job: one page for each, and an
index.

`python -m instep.check.pages docs/check` writes them; a test compares them with the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from instep.check.finding import Rule
from instep.check.rules import RULES, THEMES
from instep.check.run_warnings import RUN_WARNINGS, TITLE, RunWarning


def format_page(rule: Rule | RunWarning) -> str:
    """One page in Markdown; `instep check --explain CODE` prints it."""
    page = f"# {rule.code} {rule.name}\n\n*{rule.severity}*: {rule.sentence}\n\n{rule.page}\n"
    if isinstance(rule, RunWarning):
        return page
    return f"{page}\nTo ignore it on one line, end the line with `# instep: ignore[{rule.code}]`.\n"


def format_index() -> str:
    """The list of all rules by theme."""
    lines = [
        "# The rules of `instep check`",
        "",
        "An *error* causes wrong numbers, a hang, a crash or a lost file. A *warning* marks",
        "something slow or fragile. Most rules apply only to scripts that are visibly written",
        "for several processes.",
    ]
    for prefix, theme in THEMES.items():
        lines += ["", f"## {theme}", "", "| code | name | severity | rule |",
                  "|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| [{r.code}]({page_filename(r)}) | {r.name} | {r.severity} | {r.sentence} |"
            for code, r in RULES.items()
            if code.startswith(prefix)
        ]
    lines += [
        "",
        f"## {TITLE}",
        "",
        "These are not rules: a job that runs prints such a warning, which ends with its code.",
        "",
        "| code | name | warning |",
        "|---|---|---|",
        *(f"| [{w.code}]({page_filename(w)}) | {w.name} | {w.sentence} |"
          for w in RUN_WARNINGS.values()),
    ]  # fmt: skip
    return "\n".join([*lines, ""])


def page_filename(rule: Rule | RunWarning) -> str:
    """`INS101-collective-on-some-ranks.md`."""
    return f"{rule.code}-{rule.name}.md"


def generate_pages() -> dict[str, str]:
    """The files of docs/check by name."""
    documented: list[Rule | RunWarning] = [*RULES.values(), *RUN_WARNINGS.values()]
    return {"index.md": format_index()} | {
        page_filename(each): format_page(each) for each in documented
    }


def main(folder: str) -> None:
    """Write every page, and remove the pages of rules that no longer exist."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.md"):
        if not old.name.endswith(".zh.md"):
            old.unlink()
    for name, content in generate_pages().items():
        (target / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
