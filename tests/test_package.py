"""The package as users get it: built, checked, installed into an empty environment and used."""

import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import components
from instep.version import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch
import instep

total = instep.all_reduce(torch.tensor(instep.rank + 1.0)).item()
if instep.rank == 0:
    print(f"sum {total} of {instep.world_size}, from {instep.__file__}")
"""


def run(*words, **named):
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, **named)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("package")
    own = ["src", "tests", "docs", "examples", "benchmarks", "scripts", ".ci"]
    for name in own:
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "build")
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=left_out)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder / "tree")
    words = ("-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "tree")
    run(sys.executable, *words, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"instep-{__version__}.dist-info/METADATA").decode()
    return email.message_from_string(text)


@pytest.mark.parametrize("name", ["instep.errors", "instep.check", "instep.compat.apex"])
def test_an_unknown_name_of_a_module_is_an_attribute_error(name):
    module = importlib.import_module(name)
    assert not hasattr(module, "spam")
    with pytest.raises(ImportError, match="cannot import name 'spam'"):
        exec(f"from {name} import spam")
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'spam'"):
        _ = module.spam


def test_the_index_would_accept_both_files(dist):
    files = sorted(dist.iterdir())
    assert len(files) == 2
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


@components.needs("C++")
def test_the_wheel_has_the_kernels_in_c_for_every_python(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "instep/training/normalization/_cpu_kernels.abi3.so" in names
    assert "instep/training/draws/_mersenne_twister.abi3.so" in names
    assert "instep/training/buckets/_outer_products.abi3.so" in names
    assert "-cp311-abi3-linux_" in wheel.name


def test_the_version_is_that_of_the_module(metadata):
    assert metadata["Version"] == __version__


def test_every_link_of_the_long_description_is_absolute(metadata):
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text)
    assert pictures
    assert all("/raw/main/" in picture for picture in pictures)


def test_the_description_names_its_extras_and_addresses(metadata):
    assert {"docs", "examples", "plot", "progress"} < set(metadata.get_all("Provides-Extra"))
    names = {each.partition(",")[0] for each in metadata.get_all("Project-URL")}
    assert names == {"Repository", "Documentation", "Changelog", "Issues"}


@pytest.mark.launch
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))").strip()
    )
    # torch and numpy are those of the tests. instep is not: a .pth file in there is not read.
    here = [path for path in sys.path if path.endswith("-packages")]
    (packages / "torch.pth").write_text("\n".join(here))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, "--no-compile", wheel)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = tmp_path / "env" / "bin" / "instep"
    named = {"cwd": tmp_path, "env": environment}
    assert run(command, "--version", **named) == f"instep {__version__}\n"
    assert run(command, "check", "script.py", **named) == "Nothing found in 1 file.\n"
    printed = run(command, "run", "-n", "2", "script.py", **named)
    assert printed == f"sum 3.0 of 2, from {packages / 'instep' / '__init__.py'}\n"


def test_the_source_distribution_runs_its_own_tests(dist, tmp_path):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / f"instep-{__version__}"
    for name in ("Makefile", "constraints.txt", "docs/design.md", "examples/toy.py", ".ci/run"):
        assert (tree / name).exists(), name
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_variables.py")
    assert " passed" in run(sys.executable, *words, cwd=tree, env=environment)
