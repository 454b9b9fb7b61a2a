"""The documentation of the rules: a page each, and the list of all.

`python -m instep.check.pages docs/check` writes them; a test keeps them equal to the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from instep.check.finding import Rule
from instep.check.rules import RULES, THEMES


def format_page(rule: Rule) -> str:
    """One rule's page in Markdown; `instep check --explain CODE` prints it."""
    return (
        f"# {rule.code} {rule.name}\n\n"
        f"*{rule.severity}*: {rule.sentence}\n\n"
        f"{rule.page}\n\n"
        f"To keep such a line: `# instep: ignore[{rule.code}]` at its end.\n"
    )


def format_index() -> str:
    """The list of all rules by theme."""
    lines = [
        "# What `instep check` looks for",
        "",
        "An *error* means wrong numbers, a hang, a crash or a lost file; a *warning* something",
        "slow or fragile. Most rules only speak about scripts that are visibly written for",
        "several processes.",
    ]
    for prefix, theme in THEMES.items():
        lines += ["", f"## {theme}", "", "| code | name | severity | what it says |",
                  "|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| [{r.code}]({page_filename(r)}) | {r.name} | {r.severity} | {r.sentence} |"
            for code, r in RULES.items()
            if code.startswith(prefix)
        ]
    return "\n".join([*lines, ""])


def page_filename(rule: Rule) -> str:
    """`INS101-collective-on-some-ranks.md`."""
    return f"{rule.code}-{rule.name}.md"


def generate_pages() -> dict[str, str]:
    """Every file of docs/check by name."""
    return {"index.md": format_index()} | {
        page_filename(rule): format_page(rule) for rule in RULES.values()
    }


def main(folder: str) -> None:
    """Write every page, and remove pages of rules that are gone."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.md"):
        old.unlink()
    for name, content in generate_pages().items():
        (target / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
