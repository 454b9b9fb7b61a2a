"""A copy of the working tree with an environment of its own, in which files may be broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "scripts",
    "pyproject.toml",
    "README.md",
)


class Tree:
    """`folder` holds the copy, its `.venv`, and in `t` the temporary files of what runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ".venv" / "bin" / "python"
        self.temporary = folder / "t"

    def make(self) -> None:
        """Copy what is tracked or new in the working tree; takes the place of an older copy."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *COPIED],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        self._make_environment()

    def _make_environment(self) -> None:
        """The packages are those of the environment that runs this; `instep` is the copy's."""
        venv.create(self.folder / ".venv", symlinks=True, with_pip=False)
        ours = Path(sysconfig.get_path("purelib"))
        lines = [str(self.folder / "src"), str(ours)]
        for extra in sorted(ours.glob("*.pth")):
            paths = extra.read_text().splitlines()
            lines += [path for path in paths if path.endswith("site-packages")]
        theirs = (
            self.folder / ".venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        )
        (theirs / "site-packages" / "tree.pth").write_text("\n".join(lines) + "\n")
        for program in (Path(sys.executable).parent).iterdir():
            target = self.folder / ".venv" / "bin" / program.name
            if target.exists() or not program.is_file():
                continue
            text = program.read_bytes()
            if text.startswith(b"#!") and b"python" in text.split(b"\n", 1)[0]:
                target.write_bytes(f"#!{self.python}\n".encode() + text.split(b"\n", 1)[1])
                target.chmod(0o755)

    def environ(self) -> dict[str, str]:
        """The variables for what runs in the copy."""
        environ = os.environ | {
            "TMPDIR": str(self.temporary),
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder / ".venv"),
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a thousand processes would compile all
        return environ

    def read(self, path: str) -> bytes:
        """The text of the copy's file."""
        return (self.folder / path).read_bytes()

    def write(self, path: str, text: bytes) -> None:
        """Replace the copy's file; Python compiles it anew."""
        target = self.folder / path
        target.write_bytes(text)
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            compiled.unlink()

    def sweep(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(exist_ok=True)
