"""Write the Chinese pages of docs/check: `python scripts/check_pages_zh.py`; a test compares them.

Texts are in check_pages_zh.toml. Code, codes and names are those of the English pages.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from instep.check.finding import Rule
from instep.check.pages import format_page, page_filename
from instep.check.rules import RULES, THEMES
from instep.check.run_warnings import RUN_WARNINGS, RunWarning

PAGES = Path(__file__).parents[1] / "docs" / "check"
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
SEVERITY = {"error": "错误", "warning": "警告"}
THEME_TITLES = {
    "INS1": "互相等待的 rank",
    "INS2": "指标与评测",
    "INS3": "数据、种子与增强",
    "INS4": "学习率、批与包装",
    "INS5": "设备与启动",
    "INS6": "文件与输出",
}
HEADINGS = {"## Bad": "## 错误的写法", "## Good": "## 正确的写法"}
BLOCK = re.compile(r"(?:^## \w+\n)?^```python\n.*?^```$", re.DOTALL | re.MULTILINE)


def chinese_filename(rule: Rule | RunWarning) -> str:
    """`INS101-collective-on-some-ranks.zh.md`."""
    return page_filename(rule).replace(".md", ".zh.md")


def format_chinese(rule: Rule | RunWarning) -> str:
    """One page."""
    text = TEXTS[rule.code]
    blocks = BLOCK.findall(format_page(rule))
    for english, chinese in HEADINGS.items():
        blocks = [block.replace(english, chinese) for block in blocks]
    parts = [
        f"# {rule.code} {rule.name}",
        f"（[English]({page_filename(rule)})）*{SEVERITY[rule.severity]}*：{text['sentence']}",
        text["text"].strip(),
        *blocks,
        _ending(rule),
    ]
    return "\n\n".join(parts) + "\n"


def _ending(rule: Rule | RunWarning) -> str:
    if isinstance(rule, Rule):
        return f"要忽略某一行，在行末写 `# instep: ignore[{rule.code}]`。"
    if not rule.of_python:
        return "它是 stderr 上的一行，不是 Python 的警告。"
    command = re.findall(r"`(warnings\.filterwarnings.*)`", rule.page)[0]
    return f"要隐藏它：`{command}`。"


def format_index() -> str:
    """The list of all rules and warnings by theme."""
    lines = [
        "# `instep check` 的规则",
        "",
        "（[English](index.md)）*错误*会导致错误的数值、永远等待、崩溃或丢失文件；*警告*指出较慢或脆弱的地方。"
        "大多数规则只用于明显为多个进程而写的脚本。",
    ]
    for prefix in THEMES:
        lines += ["", f"## {THEME_TITLES[prefix]}", ""]
        lines += ["| 编号 | 名称 | 程度 | 规则 |", "|---|---|---|---|"]
        lines += [
            f"| [{code}]({chinese_filename(rule)}) | {rule.name} | {SEVERITY[rule.severity]} "
            f"| {TEXTS[code]['sentence']} |"
            for code, rule in RULES.items()
            if code.startswith(prefix)
        ]
    lines += ["", "## 作业运行时", ""]
    lines += ["这些不是规则：运行中的作业会打印这样的警告，结尾是它的编号。"]
    lines += ["", "| 编号 | 名称 | 警告 |", "|---|---|---|"]
    lines += [
        f"| [{code}]({chinese_filename(each)}) | {each.name} | {TEXTS[code]['sentence']} |"
        for code, each in RUN_WARNINGS.items()
    ]
    return "\n".join([*lines, ""])


def generate_chinese_pages() -> dict[str, str]:
    """The Chinese files of docs/check by name."""
    documented: list[Rule | RunWarning] = [*RULES.values(), *RUN_WARNINGS.values()]
    return {"index.zh.md": format_index()} | {
        chinese_filename(each): format_chinese(each) for each in documented
    }


if __name__ == "__main__":
    for old in PAGES.glob("*.zh.md"):
        old.unlink()
    for name, content in generate_chinese_pages().items():
        (PAGES / name).write_text(content, encoding="utf-8")
