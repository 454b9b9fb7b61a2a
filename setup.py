"""What pyproject.toml cannot say: the long description, which is README.md with links to the
repository, and how the C kernels are compiled."""

import re
import tomllib
from pathlib import Path

from setuptools import Extension, setup

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


# Sums may be reordered, which vector instructions need. Values may be infinite or NaN.
FAST_SUMS = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")


def extension(source: str, *options: str) -> Extension:
    """A module in C. Without a compiler, instep computes the same by torch's kernels."""
    path = Path("src/instep/training", source)
    return Extension(
        f"instep.training.{path.parent.name}._{path.stem}",
        [str(path)],
        depends=["src/instep/training/vectorized.h"],
        extra_compile_args=["-std=c11", "-O3", *options],
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[
        extension("normalization/cpu_kernels.c", *FAST_SUMS),
        extension("draws/mersenne_twister.c"),
        extension("buckets/outer_products.c"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    long_description=with_absolute_links((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
