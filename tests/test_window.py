"""The shop window: its three lists are one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import instep


def _imported_for_type_checkers():
    tree = ast.parse(Path(instep.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    homes, values = {}, set()
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: node.module.removeprefix("instep.") for alias in node.names}
        elif isinstance(node, ast.AnnAssign):
            values.add(node.target.id)
    return homes, values


def test_what_is_promised_is_what_type_checkers_and_users_get():
    homes, values = _imported_for_type_checkers()
    assert homes == instep._MODULES
    assert values == {"world", *instep._WORLD_ATTRIBUTES}
    assert sorted({*homes, *values} - {"print"}) == instep.__all__
    assert all(getattr(instep, name) is not None for name in instep.__all__)


@pytest.mark.slow
def test_public_modules_are_there_without_an_import_of_their_own():
    script = "import instep; print(instep.precision.prepare.__module__, instep.errors.InstepError)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.startswith("instep.training.amp."), found.stderr
    assert "InstepError" in found.stdout
