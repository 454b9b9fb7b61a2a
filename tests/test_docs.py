"""Links and paths in the documentation name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")]
)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./*-]+/[\w.*-]+\.(?:py|md|sh|toml|sbatch))`")
FOLDERS = ("", "src/", "src/instep/", "docs/", "examples/")
"""A path in a page begins in one of these."""


def anchors(page):
    """The fragments that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page):
    links = LINK.findall(FENCED.sub("", page.read_text()))
    relative = [link for link in links if not re.match(r"\w+:", link)]
    broken = []
    for link in relative:
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page):
    named = FILE.findall(FENCED.sub("", page.read_text()))
    folders = [page.parent, *(ROOT / folder for folder in FOLDERS)]
    missing = [name for name in named if not any([*f.glob(name)] for f in folders)]
    assert missing == []


def test_the_check_sees_links_and_files():
    readme = (ROOT / "README.md").read_text()
    assert "docs/design.md" in LINK.findall(readme)
    assert "unedited-scripts" in anchors(ROOT / "README.md")
    assert "不改动的脚本" in anchors(ROOT / "README.zh.md")
    assert FILE.findall("`process/procfs.py`, `tests/test_docs.py`") == [
        "process/procfs.py",
        "tests/test_docs.py",
    ]
