"""Write the map of src/instep into docs/design.md and design.zh.md: `python scripts/design_map.py`.

A line for each file, from the first line of its docstring. tests/test_architecture.py compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "instep"
PAGES = (ROOT / "docs" / "design.md", ROOT / "docs" / "design.zh.md")
BEGIN, END = "<!-- map -->\n```\n", "```\n<!-- end of the map -->"
FIRST_FLOOR = (
    *("process", "distributed", "training", "unedited"),
    *("compat", "check", "launch", "verify"),
)
"""In reading order, which is import order."""


def design_map(folder: Path = SOURCE) -> Iterator[str]:
    """The lines of the map: a folder's files first, then its folders."""
    depth = len(folder.relative_to(SOURCE).parts)
    yield _line(depth, f"{folder.name}/", folder / "__init__.py")
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield _line(depth + 1, path.name, path)
    order = FIRST_FLOOR if folder == SOURCE else ()
    folders = {path.parent.name: path.parent for path in folder.glob("*/__init__.py")}
    for name in (*order, *sorted(folders.keys() - {*order})):
        yield from design_map(folders[name])


def with_map(page: str) -> str:
    """The page, with the map as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "".join((before, BEGIN, *(f"{line}\n" for line in design_map()), END, after))


@cache
def _line(depth: int, name: str, path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.partition("\n\n")[0].replace("\n", " ")
    return f"{'  ' * depth}{name:{28 - 2 * depth}} {first}".rstrip()


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_map(page.read_text()))
