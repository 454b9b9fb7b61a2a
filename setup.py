"""The long description: README.md with links to the repository; pyproject.toml has all the rest."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def with_absolute_links(page: str) -> str:
    """The page with its relative links made absolute: an index shows it without the files, and its
    headings without anchors."""

    def absolute(found: re.Match[str]) -> str:
        before, path, after = found.groups()
        if not path:
            return f"{before}{REPOSITORY}{after}"
        kind = "raw" if before.startswith("!") else "tree" if (ROOT / path).is_dir() else "blob"
        return f"{before}{REPOSITORY}/{kind}/main/{path}{after}"

    return re.sub(r"(!?\[[^\]]*\]\()(?![a-z]+:)([^)#\s]*)((?:#[^)]*)?\))", absolute, page)


setup(
    long_description=with_absolute_links((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
