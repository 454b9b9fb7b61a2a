"""Gather the pages of the site in build/pages: `python scripts/site_pages.py`, then MkDocs.

The pages of docs are copied. Links that leave docs lead to a page of the site, or to the
repository. The pages of the API are written from the names that instep exports.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "build" / "pages"
MOVED = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CONTRIBUTING.zh.md": "contributing.zh.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "benchmarks/RESULTS.zh.md": "benchmarks.zh.md",
}
"""Pages outside of docs, and their places on the site."""

API = {
    "training": (
        "Models, data and metrics",
        "replicate shard weight no_sync accumulate Checkpoint Mean Accuracy Metric gather_rows "
        "PowerSGD",
    ),
    "ranks": (
        "Ranks",
        "rank world_size local_rank in_mpi world World init spawn is_main_process on_main_process "
        "print progress",
    ),
    "collectives": (
        "Collectives",
        "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all send recv "
        "barrier broadcast_object all_gather_object gather_object group Group single_process_scope",
    ),
}
"""The pages of the API: their titles, and the names of instep on them."""

PUBLIC_MODULES = {"precision": "Mixed precision", "shm": "The backend of torch.distributed"}

CSS = ".md-typeset td code { word-break: normal; }\n"
"""A word of code in a table is not divided; the table scrolls where it is too wide."""

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
OTHER_LANGUAGE = re.compile(r"[(（]\[(?:中文|English)\]\([^)]*\)[)）]\s?")
CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def repository() -> str:
    """The address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address: str = project["urls"]["Repository"]
    return address


def place_of(source: Path) -> Path:
    """Where a file of the repository is on the site."""
    name = source.relative_to(ROOT).as_posix()
    if name in MOVED:
        return TARGET / MOVED[name]
    if name.startswith("docs/"):
        return TARGET / name.removeprefix("docs/")
    return TARGET / "images" / source.name


def rewrite_link(source: Path, link: str) -> str:
    """The link as it must be on the site."""
    path, mark, fragment = link.partition("#")
    if re.match(r"\w+:", link) or not path:
        return link
    target = Path(os.path.normpath(source.parent / path))
    name = target.relative_to(ROOT).as_posix()
    is_picture = target.suffix in (".png", ".svg")
    if name not in MOVED and not name.startswith("docs/") and not is_picture:
        return f"{repository()}/{'tree' if target.is_dir() else 'blob'}/main/{name}{mark}{fragment}"
    there = place_of(target)
    if is_picture and not there.exists():
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, there)
    return os.path.relpath(there, place_of(source).parent) + mark + fragment


def join_chinese_lines(text: str) -> str:
    """Join the lines of each paragraph: browsers show a space for the end of a line."""
    lines: list[str] = []
    for line in text.split("\n"):
        goes_on = lines and not lines[-1].startswith(("#", "|"))
        if goes_on and CHINESE.match(lines[-1][-1:]) and CHINESE.match(line):
            lines[-1] += line
        else:
            lines.append(line)
    return "\n".join(lines)


def rewrite(source: Path) -> str:
    """The text of a page for the site. It has no link to its translation: the menu leads there."""
    parts = FENCED.split(source.read_text())
    for at in range(0, len(parts), 2):
        if source.name.endswith(".zh.md"):
            parts[at] = join_chinese_lines(parts[at])
        parts[at] = LINK.sub(
            lambda found: found[1] + rewrite_link(source, found[2]) + found[3],
            OTHER_LANGUAGE.sub("", parts[at]),
        )
    return "".join(parts)


def api_pages() -> dict[str, str]:
    """The pages of the API by name."""
    pages = {}
    for name, (title, members) in API.items():
        entries = [f"::: instep.{member}\n" for member in members.split()]
        pages[f"api/{name}.md"] = "\n".join([f"# {title}\n", *entries])
    for name, title in PUBLIC_MODULES.items():
        pages[f"api/{name}.md"] = f"# {title}: `instep.{name}`\n\n{_module(name)}"
    tree = ast.get_docstring(ast.parse((ROOT / "src/instep/errors.py").read_text())) or ""
    sentence, _, rest = tree.partition("\n\n")
    drawing, _, note = rest.rpartition("\n\n")
    pages["api/errors.md"] = (
        f"# Errors: `instep.errors`\n\n{sentence}\n\n```text\n{drawing}\n```\n\n{note}\n\n"
        "[Troubleshooting](../troubleshooting.md) lists the messages.\n"
    )
    return pages


def _module(name: str) -> str:
    return (
        f"::: instep.{name}\n    options:\n      show_root_heading: false\n"
        "      show_root_toc_entry: false\n"
    )


def main() -> None:
    """Write all pages and copy all pictures of docs."""
    shutil.rmtree(TARGET, ignore_errors=True)
    sources = [ROOT / name for name in MOVED if (ROOT / name).exists()]
    sources += [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    taken: set[Path] = set()
    for source in reversed(sources):  # pages of docs come before the READMEs
        target = place_of(source)
        if target in taken:
            continue
        taken.add(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(rewrite(source))
        else:
            shutil.copyfile(source, target)
    (TARGET / "site.css").write_text(CSS)
    for name, text in api_pages().items():
        (TARGET / name).parent.mkdir(exist_ok=True)
        (TARGET / name).write_text(text)


if __name__ == "__main__":
    main()
