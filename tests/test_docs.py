"""Links and paths in the documentation name files that exist."""

import fnmatch
import re
from functools import cache
from pathlib import Path

import pytest

from instep.check.rules import RULES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("README*.md"), *ROOT.glob("CONTRIBUTING*.md"), *(ROOT / "docs").glob("**/*.md")]
)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./*-]+/[\w.*-]+\.(?:py|md|sh|toml|sbatch))`")
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "scripts")
FILES = [f"/{path.relative_to(ROOT)}" for f in FOLDERS for path in (ROOT / f).rglob("*.*")]


@cache
def anchors(page):
    """The fragments that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@cache
def text_of(page):
    """Its text without blocks of code."""
    return FENCED.sub("", page.read_text())


def is_there(page, link):
    path, _, fragment = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not fragment or fragment in anchors(target))


def test_every_relative_link_resolves():
    links = {(page, link) for page in PAGES for link in LINK.findall(text_of(page))}
    relative = [each for each in links if not re.match(r"\w+:", each[1])]
    assert len(relative) > 500
    assert [each for each in relative if not is_there(*each)] == []


def test_every_file_that_is_named_exists():
    named = {(name, page) for page in PAGES for name in FILE.findall(text_of(page))}
    patterns = {name for name, _ in named}
    missing = {name for name in patterns if not fnmatch.filter(FILES, f"*/{name}")}
    assert [each for each in named if each[0] in missing] == []


def test_the_check_sees_links_and_files():
    readme = (ROOT / "README.md").read_text()
    assert "docs/design.md" in LINK.findall(readme)
    assert "unedited-scripts" in anchors(ROOT / "README.md")
    assert "不改动的脚本" in anchors(ROOT / "README.zh.md")
    assert FILE.findall("`process/procfs.py`, `tests/test_docs.py`") == [
        "process/procfs.py",
        "tests/test_docs.py",
    ]


def test_every_name_in_how_to_add_is_in_the_code():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## How to add")[1]
    names = {
        part
        for code in re.findall(r"`([^`]+)`", section)
        if "/" not in code
        for part in re.findall(r"[A-Za-z_]\w{3,}", code.partition("(")[0])
    }
    code = "".join(path.read_text() for f in ("src", "tests") for path in (ROOT / f).rglob("*.py"))
    assert len(names) > 20
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readmes_count_the_rules_of_check(page):
    text = (ROOT / page).read_text()
    link = re.search(r"\[(\d+)[^\]]*\]\(docs/check/index(?:\.zh)?\.md\)", text)
    assert int(link[1]) == len(RULES)
