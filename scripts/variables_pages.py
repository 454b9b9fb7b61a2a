"""Write the tables of both pages of variables in docs: `python scripts/variables_pages.py`.

Names, values and defaults come from the registry. The last column of the Chinese page is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from instep.process.settings import SETTINGS, Setting

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(r"^\| `(INSTEP_\w+)` \|.*\| (.*?) \|\n", re.MULTILINE)


def domain_zh(setting: Setting) -> str:
    """The values that are allowed, in Chinese."""
    if setting.numbers is not None:
        return f"{setting.numbers[0]} 到 {setting.numbers[-1]} 的整数"
    if setting.choices:
        return "、".join(setting.choices)
    texts = {
        "the path of a file": "文件路径",
        "the path of a folder": "文件夹路径",
        "16 characters or more": "至少 16 个字符",
    }
    return texts[setting.text]


def english(page: str) -> str:
    """The page with the table of the registry."""
    return _with_rows(page, [(s, s.domain, s.default or "unset", s.meaning) for s in SETTINGS])


def chinese(page: str) -> str:
    """The page with the table of the registry; a variable without a translation keeps English."""
    known = dict(ROW.findall(page))
    return _with_rows(
        page,
        [(s, domain_zh(s), s.default or "无", known.get(s.name, s.meaning)) for s in SETTINGS],
    )


def _with_rows(page: str, rows: list[tuple[Setting, str, str, str]]) -> str:
    start = ROW.search(page)
    assert start is not None, "the page has no table of variables"
    table = "".join(
        f"| `{setting.name}` | {values} | {default} | {meaning} |\n"
        for setting, values, default, meaning in rows
    )
    return page[: start.start()] + table + ROW.sub("", page[start.start() :])


def main() -> None:
    """Write both pages."""
    for name, write in (("variables.md", english), ("variables.zh.md", chinese)):
        page = DOCS / name
        page.write_text(write(page.read_text()))


if __name__ == "__main__":
    main()
