"""The house rules that can be checked: sizes, imports, names, and the map in docs/design.md."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import grimp
import pytest
import torch

import instep
from instep import check, errors, shm
from instep.process.torch_private import versions

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import design_map

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "instep"
DESIGN = ROOT / "docs" / "design.md"
FILES = sorted(SRC.rglob("*.py"))
TORCH_PACKAGES = (
    *("_dynamo", "amp", "autograd", "cuda", "distributed", "fx", "multiprocessing", "nn"),
    *("optim", "profiler", "testing", "utils"),
)
STANDARD_LIBRARY = (
    *("argparse", "ast", "asyncio", "collections", "concurrent.futures", "contextlib", "email"),
    *("faulthandler", "fcntl", "functools", "gc", "hashlib", "hmac", "importlib.abc", "inspect"),
    *("io", "json", "linecache", "logging", "mmap", "multiprocessing", "os", "pathlib", "pickle"),
    *("random", "resource", "sched", "secrets", "select", "selectors", "shlex", "shutil", "signal"),
    *("socket", "socketserver", "sqlite3", "ssl", "stat", "statistics", "string", "struct"),
    *("subprocess", "sys", "tempfile", "threading", "time", "tokenize", "traceback", "types"),
    *("typing", "unittest.mock", "uuid", "warnings", "weakref", "zipfile"),
)

PUBLISHED = frozenset(
    (*instep.__all__, *check.__all__, *shm.__all__, *errors.__dir__(), "resident")
)
"""Names that users know."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Those of a file's syntax tree, of which the module is the first."""
    return [*ast.walk(ast.parse(path.read_text()))]


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """At the end nobody holds the syntax trees, which are half a million objects."""
    yield
    nodes.cache_clear()


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_a_package_holds_at_most_14_files(folder: Path) -> None:
    assert len([*folder.glob("*.py")]) <= 14


def test_the_package_holds_python_and_three_files_of_c() -> None:
    """And what setup.py builds of these."""
    built = (".pyc", ".so")
    files = [path for path in SRC.rglob("*") if path.is_file() and path.suffix not in built]
    others = {path for path in files if path.suffix != ".py"}
    training = SRC / "training"
    assert others == {
        *(SRC / "py.typed", training / "vectorized.h"),
        *(training / "normalization" / name for name in ("cpu_kernels.c", "_cpu_kernels.pyi")),
        *(training / "draws" / name for name in ("mersenne_twister.c", "_mersenne_twister.pyi")),
        *(training / "buckets" / name for name in ("outer_products.c", "_outer_products.pyi")),
    }


def test_no_file_is_longer_than_400_lines() -> None:
    assert [path for path in FILES if path.read_text().count("\n") > 400] == []


def test_the_first_floor_has_eight_packages_that_say_what_they_are_for() -> None:
    packages = {path.parent.name: nodes(path)[0] for path in SRC.glob("*/__init__.py")}
    assert len(packages) <= 8
    sentences = {
        name: len(re.findall(r"[.!?](?=\s|$)", ast.get_docstring(tree) or ""))
        for name, tree in packages.items()
    }
    assert {name: count for name, count in sentences.items() if count < 3} == {}


def circle(imported: dict[str, set[str]]) -> set[str]:
    """Those of these that import themselves through others, and what imports them."""
    waiting, order = {**imported}, set[str]()
    while free := {name for name, needs in waiting.items() if needs <= order}:
        order |= free
        for name in free:
            del waiting[name]
    return {*waiting}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of instep imports of the others."""
    graph = grimp.build_graph("instep", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_no_module_imports_itself_through_others(imports: dict[str, set[str]]) -> None:
    assert circle(imports) == set()


def test_no_part_of_a_package_imports_itself_through_other_parts(
    imports: dict[str, set[str]],
) -> None:
    """Its modules and sub-packages, each with all that is in it."""
    for package in {name.rpartition(".")[0] for name in imports} - {""}:
        begin = f"{package}."
        parts: dict[str, set[str]] = defaultdict(set)
        for name, imported in imports.items():
            if name.startswith(begin):
                inside = {each for each in imported if each.startswith(begin)}
                part = name.removeprefix(begin).partition(".")[0]
                parts[part] |= {x.removeprefix(begin).partition(".")[0] for x in inside} - {part}
        assert circle(parts) == set(), package


def test_a_class_name_stands_once() -> None:
    """Two interfaces of other libraries may have a class of one name."""
    names = Counter(
        node.name
        for path in FILES
        if "compat" not in path.parts
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_names_are_made_of_words_of_the_field() -> None:
    """Of modules, classes, public functions and methods.

    compat/ has the names of other libraries, a rule of check is named after what it finds, and
    what users import or catch keeps its name.
    """
    allowed = vocabulary() | glossary()
    unknown = defaultdict(set)
    for path in FILES:
        if not {"compat", "rules"} & {*path.parts}:
            for name in {*public_names(path)} - PUBLISHED:
                for word in words(name):
                    if not is_known(word, allowed):
                        unknown[word].add(f"{path.relative_to(SRC)}: {name}")
    assert unknown == {}


def test_the_glossary_is_short_and_each_entry_is_in_use() -> None:
    entries = glossary_entries()
    assert 0 < len(entries) <= 25
    used = {word for path in FILES for name in public_names(path) for word in words(name)}
    assert [entry for entry in entries if not any(is_known(w, used) for w in words(entry))] == []


def test_every_error_is_found_in_the_module_of_errors() -> None:
    """And in its tree; those of compat are of other libraries' interfaces."""
    found = {"InstepError"}
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in FILES
        if "compat" not in path.parts
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }
    while more := {name for name in {*bases} - found if bases[name] & found}:
        found |= more
    assert len(found) > 50
    assert {getattr(errors, name).__name__ for name in found} == found
    assert [name for name in found if name not in (errors.__doc__ or "").split()] == []


def test_few_modules_beside_launch_write_the_environment() -> None:
    """`launch/` starts processes, and may be one of them."""
    writers = {
        str(path.relative_to(SRC))
        for path in FILES
        if SRC / "launch" not in path.parents and writes_environment(path)
    }
    assert writers == {
        "process/procfs.py",  # on behalf of launch/
        "compat/horovod/driver_client.py",  # the rank's numbers in the next world of an elastic job
        "distributed/gloo_connections.py",  # PyTorch reads it from there only
        "distributed/rendezvous/bootstrap.py",  # so do Gloo, NCCL and HCCL
        "unedited/session.py",  # so does Python, which starts again
        "unedited/launcher_env.py",  # what the script must not see
        "distributed/rendezvous/listening.py",  # the number of a socket that is taken
        "compat/horovod/basics.py",  # Horovod's name of one of our settings
        "compat/horovod/util.py",  # Horovod's own function for it
    }


def writes_environment(path: Path) -> bool:
    """By `os.environ[...] = ...`, `del os.environ[...]`, a method that changes it, or putenv."""
    return any(
        (
            isinstance(node, ast.Subscript)
            and not isinstance(node.ctx, ast.Load)
            and ast.unparse(node.value) == "os.environ"
        )
        or (isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "os.environ")
        or (
            isinstance(node, ast.Attribute)
            and re.fullmatch(
                r"os\.(environ\.(clear|pop|popitem|setdefault|update)|putenv|unsetenv|environb)",
                ast.unparse(node),
            )
        )
        for node in nodes(path)
    )


def test_few_modules_call_the_collectives_of_torch() -> None:
    """The backend through shared memory calls those of Gloo itself."""
    callers = {
        str(path.relative_to(SRC / "distributed"))
        for path in FILES
        if {*collectives_of_torch(path)}
    }
    assert callers == {
        "communication/groups.py",
        "communication/thread_channel.py",
        "communication/transport.py",
        "rendezvous/group_states.py",
    }


def collectives_of_torch(path: Path) -> Iterator[str]:
    """The functions of torch.distributed by which ranks exchange anything, where it names them."""
    pattern = re.compile(
        r"(all_|batch_)?(reduce|gather|to_all|isend_irecv|scatter)(_\w+)?|reduce_scatter\w*|scatter"
        r"|broadcast(_\w+)?|barrier|monitored_barrier|i?(send|recv)(_object_list)?|new_\w*group\w*"
    )
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and pattern.fullmatch(node.attr):
            if ast.unparse(node.value) in ("dist", "torch.distributed", "distributed_c10d"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            yield from (name.name for name in node.names if pattern.fullmatch(name.name))


def test_private_names_of_torch_stand_in_one_package() -> None:
    found = {path.parent for path in FILES if [*private_names_of_torch(path)]}
    assert found == {SRC / "process" / "torch_private"}


def private_names_of_torch(path: Path) -> Iterator[str]:
    """Names with an underscore that are imported from torch, or are attributes of what is."""
    known = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    known[each.asname or "torch"] = each.name if each.asname else "torch"
                    yield from [each.name] * ("._" in each.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                name = known[each.asname or each.name] = f"{node.module}.{each.name}"
                yield from [name] * ("._" in name)
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            root, *names = ast.unparse(node).split(".")
            if root in known and any(re.match(r"_(?!_)", name) for name in names):
                yield ".".join([known[root], *names])


def test_the_versions_that_were_tried_are_those_of_the_table() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "compat.json").read_text())
    tried = {tuple(map(int, row["torch"].split(".")[:2])) for row in results.values()}
    assert (min(tried), max(tried)) == versions.TRIED


def test_the_map_in_the_design_is_that_of_the_files() -> None:
    """`python scripts/design_map.py` writes it."""
    for page in design_map.PAGES:
        assert design_map.with_map(page.read_text()) == page.read_text()


def test_the_design_names_functions_that_exist() -> None:
    """Written as `file`: `function` or `file`: `Class.method`."""
    pairs = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", DESIGN.read_text())
    assert len(pairs) > 20
    missing = [
        (path, name)
        for path, name in pairs
        for part in name.split(".")
        if not re.search(rf"^ *(?:def|class) {part}\b", (SRC / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


def public_names(path: Path) -> Iterator[str]:
    """Of a module: its own, and those of its classes, public functions and public methods."""
    yield path.parent.name if path.name == "__init__.py" else path.stem.strip("_")
    for node in nodes(path)[0].body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (
                part.name
                for part in node.body
                if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
            )
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


def words(name: str) -> list[str]:
    """The words of `snake_case` or `CamelCase`, in lower case, without numbers."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return [part.lower() for part in parts]


def is_known(word: str, known: Iterable[str]) -> bool:
    """Whether the word, or another form of it, is among these."""
    return not {*forms(word)}.isdisjoint(known)


def forms(word: str) -> Iterator[str]:
    """The word itself, and what it may be the plural, the past or the participle of."""
    yield word
    for ending, others in (
        *(("ies", ("y",)), ("es", ("", "e")), ("s", ("",))),
        *(("ied", ("y",)), ("ed", ("", "e")), ("ing", ("", "e"))),
        *(("er", ("", "e")), ("or", ("", "e"))),
    ):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word.removesuffix(ending)
            yield from (stem + other for other in others)
            if stem[-1] == stem[-2] and not ending.endswith("s"):
                yield stem[:-1]  # dropped, running
    yield from (f"{word}s", f"{word}ing", f"{word}ed")


@cache
def vocabulary() -> frozenset[str]:
    """The words in names of PyTorch and the standard library, and those of tests/vocabulary.txt."""
    known = {"instep"}
    folder = Path(torch.__file__).parent
    for package in ("", *TORCH_PACKAGES):
        for path in folder.glob("*.py") if not package else (folder / package).rglob("*.py"):
            known.update(words(path.stem))
            text = path.read_text(errors="replace")
            for name in re.findall(r"^\s*(?:def|class) (\w+)", text, re.MULTILINE):
                known.update(words(name))
    for module in (builtins, *map(importlib.import_module, STANDARD_LIBRARY)):
        known.update(words(module.__name__))
        for name in dir(module):
            known.update(words(name))
            if isinstance(value := getattr(module, name), type):
                known.update(word for part in dir(value) for word in words(part))
    text = (ROOT / "tests" / "vocabulary.txt").read_text()
    known.update(word for line in text.splitlines() if line[:1] != "#" for word in line.split())
    return frozenset(known)


def glossary_entries() -> list[str]:
    """The terms of the table under the heading Glossary of docs/design.md."""
    section = DESIGN.read_text().partition("## Glossary")[2].partition("\n## ")[0]
    return re.findall(r"^- \*\*([\w -]+)\*\*", section, re.MULTILINE)


def glossary() -> frozenset[str]:
    return frozenset(word for entry in glossary_entries() for word in words(entry))


def test_what_benchmarks_import_is_there():
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):  # no test runs them
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "instep":
                module = importlib.import_module(node.module)
                for each in node.names:
                    found = hasattr(module, each.name) or find_spec(f"{node.module}.{each.name}")
                    assert found, f"{path}:{node.lineno}"
