"""The tables of docs/unedited.md and docs/unedited.zh.md, from the results of unedited_table.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: written by benchmarks/unedited_table.py --docs -->\n", "<!-- end -->"
BEGIN_EXAMPLES = "<!-- examples: written by benchmarks/unedited_table.py --docs -->\n"
Row = Mapping[str, Any]

HEADS = {
    "unedited.md": (
        "| Package or repository | Version | What is run | Calls | Own noise | N = 2 | N = 3 "
        "| Step, ms | Time, N = 2 | Two at once | Result |"
    ),
    "unedited.zh.md": (
        "| 软件包或代码库 | 版本 | 运行内容 | 模块调用 | 自身噪声 | N = 2 | N = 3 "
        "| 每步毫秒 | N = 2 的耗时 | 两个同时 | 结果 |"
    ),
}
WORDS = {
    "unedited.md": {
        "divided": "divided",
        "partly": "partly divided",
        "whole": "whole",
        "same": "same",
        "error": "error",
        "": "",
    },
    "unedited.zh.md": {
        "divided": "切分",
        "partly": "部分切分",
        "whole": "完整计算",
        "same": "相同",
        "error": "出错",
        "": "",
    },
}
SUMMARY = (
    "accelerate_loop",
    "diffusers_unet",
    "gpytorch_exact",
    "lightning_trainer",
    "nanogpt",
    "sb3_ppo",
    "timm_loop",
    "torchvision_resnet",
    "transformers_trainer",
    "ultralytics_yolo",
)
"""The cases of the short table."""
SUMMARY_COLUMNS = (0, 2, 3, 4, 5, 7, 8, 10)
SUMMARY_TITLES = {
    "unedited.md": ("Ten of them:", "All of them:"),
    "unedited.zh.md": ("其中十个：", "全部用例："),
}
EXAMPLE_HEADS = {
    "unedited.md": "| Script | Step, ms | Time, N = 2 | Two at once |",
    "unedited.zh.md": "| 脚本 | 每步毫秒 | N = 2 的耗时 | 两个同时 |",
}
DIFFERENT = {"unedited.md": "different", "unedited.zh.md": "不同"}
COUNTED = {
    "unedited.md": (
        "{cases} cases of {packages} packages and repositories: {same} the same, of which "
        "{divided} divided, {partly} partly divided and {whole} whole; {different} different; "
        "{error} in error. Time: of {timed} cases {even} take at most 1.05 of plain `python`; of "
        "the {long} with steps of 30 ms and more {gaining} take at most 0.70."
    ),
    "unedited.zh.md": (
        "{packages} 个软件包和代码库的 {cases} 个用例：{same} 个相同，"
        "其中 {divided} 个切分、{partly} 个部分切分、{whole} 个完整计算；"
        "{different} 个不同；{error} 个出错。"
        "耗时：{timed} 个计时的用例中 {even} 个不超过普通 `python` 的 1.05 倍；"
        "每步 30 毫秒以上的 {long} 个中，{gaining} 个不超过 0.70 倍。"
    ),
}


def table(rows: Mapping[str, Row], page: str) -> str:
    """The part of the page between the markers."""
    heads = HEADS[page].strip("| ").split(" | ")
    lines = [format_cells(heads), "|" + " --- |" * len(heads)]
    summary = [format_cells(in_summary(heads)), "|" + " --- |" * len(SUMMARY_COLUMNS)]
    reasons = []
    for row in sorted(rows.values(), key=lambda row: (row["title"].lower(), row["case"])):
        name = f"`{row['case']}`"
        cells = row_cells(row, page)
        lines.append(format_cells(cells))
        if row["case"] in SUMMARY:
            summary.append(format_cells(in_summary(cells)))
        told = [line.removeprefix("instep: ") for line in row["lines"] if "every rank comp" in line]
        if told:
            reasons.append(f"- {name}: " + "; ".join(told[:3]).replace("|", "\\|"))
    counted = COUNTED[page].format(**count(rows))
    some, every = SUMMARY_TITLES[page]
    parts = [counted, "", some, "", *summary, "", every, "", *lines, "", *reasons]
    return "\n".join(parts).rstrip() + "\n"


def examples_table(rows: Mapping[str, Row], page: str) -> str:
    """The part of the page between the markers of the examples."""
    lines = [EXAMPLE_HEADS[page], "|" + " --- |" * 4]
    for name, row in sorted(rows.items()):
        ratios = [f"{row[key]:.2f}" for key in ("ratio", "ratio_at_once")]
        lines.append(format_cells([f"`{name}.py`", f"{row['step_ms']:.0f}", *ratios]))
    return "\n".join(lines) + "\n"


def row_cells(row: Row, page: str) -> list[str]:
    """The cells of one row of the whole table."""
    words = WORDS[page]
    package, _, what = row["title"].partition(": ")
    found = [row["differences"].get(n) for n in ("2", "3")]
    return [
        package,
        row["version"],
        what,
        words[row["calls"]],
        number(row["noise"].get("parameters")),
        *(number(f and f["parameters"]) for f in found),
        f"{row['step_ms']:.0f}" if row["step_ms"] else "",
        f"{row['ratio']:.2f}{'' if row.get('steps') else '*'}" if row["ratio"] else "",
        f"{row['ratio_at_once']:.2f}" if row.get("ratio_at_once") else "",
        words.get(row["verdict"]) or DIFFERENT[page],
    ]


def format_cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def in_summary(cells: Sequence[str]) -> list[str]:
    """The cells of the short table, from those of the whole one."""
    return [cells[k] for k in SUMMARY_COLUMNS]


def number(value: float | None) -> str:
    """One digit is enough to compare with the noise."""
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def count(rows: Mapping[str, Row]) -> dict[str, int]:
    same = [row for row in rows.values() if row["verdict"] == "same"]
    kinds = {k: sum(row["calls"] == k for row in same) for k in ("divided", "partly", "whole")}
    timed = [row for row in rows.values() if row["ratio"]]
    long = [row for row in timed if row["step_ms"] >= 30]
    error = sum(row["verdict"] in ("error", "no plain run") for row in rows.values())
    return {
        "cases": len(rows),
        "packages": len({row["title"].partition(":")[0] for row in rows.values()}),
        "same": len(same),
        **kinds,
        "different": len(rows) - len(same) - error,
        "error": error,
        "timed": len(timed),
        "even": sum(row["ratio"] <= 1.05 for row in timed),
        "long": len(long),
        "gaining": sum(row["ratio"] <= 0.70 for row in long),
    }


def between_markers(text: str, begin: str = BEGIN) -> str:
    return text.partition(begin)[2].partition(END)[0]


def write(rows: Mapping[str, Row], examples: Mapping[str, Row], docs: Path) -> None:
    """Replace what stands between the markers of both pages."""
    for page in HEADS:
        text = (docs / page).read_text()
        text = _with_part(text, BEGIN, table(rows, page))
        text = _with_part(text, BEGIN_EXAMPLES, examples_table(examples, page))
        (docs / page).write_text(text)


def _with_part(text: str, begin: str, part: str) -> str:
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    assert found
    assert end
    return before + begin + part + end + after
