"""What a forward keeps in modules, classes and functions of libraries is that of one process."""

from __future__ import annotations

import builtins
import collections
import importlib
import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.unedited.objects import library_state
from instep.unedited.objects.script_code import code_of, names_set_in
from instep.unedited.objects.syntax_trees import tree_of
from instep.unedited.sharded_call import modules
from pool import ranks
from sharded_training import Around, sharding

pytestmark = pytest.mark.slow

rows_seen: Any = 0


def in_a_module(_: Any, x: Tensor) -> None:
    torch.rows_seen += len(x)  # type: ignore[attr-defined]


def in_a_new_attribute(_: Any, x: Tensor) -> None:
    torch.rows_of_all = getattr(torch, "rows_of_all", 0) + len(x)  # type: ignore[attr-defined]


def in_an_inner_module(_: Any, x: Tensor) -> None:
    torch.nn.functional.rows_seen += len(x)  # type: ignore[attr-defined]


def in_builtins(_: Any, x: Tensor) -> None:
    builtins.rows_seen += len(x)  # type: ignore[attr-defined]


def in_globals(_: Any, x: Tensor) -> None:
    globals()["rows_seen"] += len(x)


def by_the_name_of_a_module(_: Any, x: Tensor) -> None:
    sys.modules["json"].rows_seen += len(x)  # type: ignore[attr-defined]


def by_the_name_of_an_attribute(_: Any, x: Tensor) -> None:
    vars(torch)["rows_seen"] += len(x)


def in_a_class(_: Any, x: Tensor) -> None:
    nn.Linear.rows_seen += len(x)  # type: ignore[operator, assignment]


def in_a_class_of_python(_: Any, x: Tensor) -> None:
    collections.Counter.rows_seen += [len(x)]  # type: ignore[attr-defined]


def in_a_function(_: Any, x: Tensor) -> None:
    functional.normalize.rows_seen += len(x)  # type: ignore[attr-defined]


def in_a_list(_: Any, x: Tensor) -> None:
    torch.rows_seen.append(len(x))  # type: ignore[attr-defined]


def by_a_variable_of_its_own(_: Any, x: Tensor) -> None:
    space = torch.__dict__
    space["rows_seen"] += len(x)


def count_in(module: Any, rows: int) -> None:
    module.rows_seen += rows


def in_a_module_that_a_function_gets(_: Any, x: Tensor) -> None:
    count_in(torch, len(x))


PLACES: dict[Callable[[Any, Tensor], None], Any] = {
    in_a_module: torch,
    in_a_new_attribute: torch,
    in_an_inner_module: functional,
    in_builtins: builtins,
    in_globals: sys.modules[__name__],
    by_the_name_of_a_module: __import__("json"),
    by_the_name_of_an_attribute: torch,
    by_a_variable_of_its_own: torch,
    in_a_module_that_a_function_gets: torch,
    in_a_class: nn.Linear,
    in_a_class_of_python: collections.Counter,
    in_a_function: functional.normalize,
    in_a_list: torch,
}


class Keeping(Around):
    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        found: Tensor = self.body(x)
        return found


@contextmanager
def attribute_of(place: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, it has this value, or none if that is None; afterwards it is as it was.

    This file calls `setattr` with a variable in one place only, which a test is about: what is read
    from its text must not hold for all modules.
    """
    with patch.object(place, name, value, create=True):
        if value is None:
            delattr(place, name)
        yield


@pytest.mark.parametrize("keep", PLACES, ids=lambda keep: keep.__name__)
@ranks(2)
def test_rows_are_counted_once_in_what_a_library_has(keep: Callable[[Any, Tensor], None]) -> None:
    is_list = keep in (in_a_list, in_a_class_of_python)
    name = "rows_of_all" if keep is in_a_new_attribute else "rows_seen"
    begin: Any = [] if is_list else None if keep is in_a_new_attribute else 0
    model, x = Keeping(keep), torch.randn(6, 6)
    with attribute_of(PLACES[keep], name, begin):
        with sharding():
            for _ in range(4):
                model(x)
        assert getattr(PLACES[keep], name) == ([6] * 4 if is_list else 24)
    assert modules.call_counts.whole == 4


def count_nothing(_: Any, x: Tensor) -> None:
    collections.Counter(range(len(x)))


@ranks(2)
def test_a_forward_that_only_names_what_others_count_in_is_divided() -> None:
    model, x = Keeping(count_nothing), torch.randn(6, 6)
    with attribute_of(collections.Counter, "rows_seen", []), sharding():
        for _ in range(4):
            model(x)
    assert modules.call_counts.sharded == 4


class Coupled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores - torch.weight_of_mean * scores.mean(0)  # type: ignore[attr-defined, no-any-return]


def set_by_its_name(value: float) -> None:
    torch.weight_of_mean = value  # type: ignore[attr-defined]


def set_by_a_text(value: float) -> None:
    for name, option in {"strength_of_mean": value}.items():
        setattr(torch, name, option)


class CoupledByAText(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores - torch.strength_of_mean * scores.mean(0)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("kind", "name", "set_weight"),
    [
        (Coupled, "weight_of_mean", set_by_its_name),
        (CoupledByAText, "strength_of_mean", set_by_a_text),
    ],
)
@ranks(2)
def test_a_number_that_the_script_sets_in_a_library_is_compared_when_it_changes(
    kind: type[nn.Linear], name: str, set_weight: Callable[[float], None]
) -> None:
    model, x = kind(6, 3), torch.randn(6, 6)
    with attribute_of(torch, name, 0.0), sharding():
        for k in range(6):
            set_weight(float(k > 3))
            scores = model(x)
    expected = functional.linear(x, model.weight, model.bias)
    torch.testing.assert_close(scores, expected - expected.mean(0))


def leave(scores: Tensor) -> Tensor:
    return scores


def couple(scores: Tensor) -> Tensor:
    return scores - scores.mean(0)


class Leaving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Coupling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


shape = leave


class Shaping(nn.Module):
    """Of functions and of a part's class: no branch shows that they are others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(6, 3), Leaving()

    def forward(self, x: Tensor) -> Tensor:
        return shape(functional.mish(self.part(self.layer(x))))


def replace_a_variable(_: Shaping) -> None:
    global shape
    shape = couple


def replace_a_function_of_a_library(_: Shaping) -> None:
    functional.mish = couple  # type: ignore[assignment]


def replace_a_class(model: Shaping) -> None:
    model.part.__class__ = Coupling


REPLACED = [replace_a_variable, replace_a_function_of_a_library, replace_a_class]


@pytest.mark.parametrize("replace", REPLACED, ids=lambda replace: replace.__name__)
@ranks(2)
def test_a_function_or_class_that_the_script_replaces_is_seen_at_the_next_call(
    replace: Callable[[Shaping], None],
) -> None:
    global shape
    torch.manual_seed(0)
    model, x, mish = Shaping(), torch.randn(6, 6), functional.mish
    try:
        with sharding():
            for _ in range(5):
                model(x)
            assert modules.call_counts.sharded == 5
            replace(model)
            found = model(x)
        torch.testing.assert_close(found, model(x))
    finally:
        shape, functional.mish = leave, mish


@ranks(2)
def test_rows_are_counted_once_by_a_forward_that_an_instance_was_given() -> None:
    model, x, seen = nn.Linear(6, 3), torch.randn(6, 6), {"rows": 0}
    forward = model.forward

    def counting(x: Tensor) -> Tensor:
        seen["rows"] += len(x)
        return forward(x)

    model.forward = counting  # type: ignore[method-assign]
    with sharding():
        for _ in range(4):
            model(x)
    assert seen == {"rows": 24}


SEEN: ContextVar[int] = ContextVar("SEEN", default=0)


class CountingInContext(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.set(SEEN.get() + len(x))
        return super().forward(x)


@ranks(2)
def test_a_context_variable_without_a_value_has_its_default_while_calls_are_compared() -> None:
    def run() -> None:
        model, x = CountingInContext(6, 3), torch.randn(6, 6)
        with sharding() as log:
            for _ in range(4):
                model(x)
        assert SEEN.get() == 24
        if torch.distributed.get_rank() == 0:
            assert "whole: the global variable SEEN depends on the rows" in log.getvalue()

    copy_context().run(run)


class Peak(nn.Linear):
    """Notes in memory that processes share a large value, which few batches have."""

    def __init__(self, memory: Any, index: str) -> None:
        super().__init__(6, 3)
        self.memory, self.index = memory, index

    def forward(self, x: Tensor) -> Tensor:
        peak = int(x.abs().max() > 20) * 7
        if self.index:
            self.memory[0] = max(self.memory[0], peak)
        else:
            self.memory.value = max(self.memory.value, peak)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["Value", "Array", "RawArray", "SharedMemory"])
@ranks(2)
def test_memory_that_processes_share_is_written_by_whole_batches_only(kind: str) -> None:
    """The comparison tries others, of larger values."""
    shared = SharedMemory(create=True, size=8) if kind == "SharedMemory" else None
    length: int = 0 if kind == "Value" else 8
    memory = shared.buf if shared else getattr(multiprocessing, kind)("i", length)
    model = Peak(memory, "" if kind == "Value" else "0")
    with sharding() as log:
        for _ in range(3):
            model(torch.ones(6, 6).cumsum(0))
    assert (memory.value if kind == "Value" else memory[0]) == 0
    assert modules.call_counts.whole == 3
    if shared:
        model.memory = memory = None
        shared.close()
        shared.unlink()
    if torch.distributed.get_rank() == 0:
        assert "may write to memory that processes share" in log.getvalue()


@pytest.fixture
def imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], types.ModuleType]]:
    """A function that imports a module of a script, of a name and a text."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(name: str, text: str) -> types.ModuleType:
        tmp_path.joinpath(f"{name}.py").write_text(text)
        names.append(name)
        return importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_only_files_that_set_what_a_function_names_are_parsed_and_these_once(
    imported: Callable[[str, str], types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def parse(file: str) -> Any:
        parsed.append(Path(file).stem)
        return tree_of(file)

    monkeypatch.setattr(library_state, "tree_of", parse)
    imported("one_that_counts", "import torch\ndef count():\n    torch.seen_by_one += 1\n")
    imported("one_that_does_not", "class A:\n    def f(self):\n        self.seen_by_one = 1\n")
    model = imported(
        "one_with_a_model",
        "import torch\n"
        "def forward(x):\n    return x + torch.seen_by_one\n"
        "def other(x):\n    return x * torch.seen_by_one\n"
        "def without(x):\n    return torch.relu(x)\n",
    )
    with attribute_of(torch, "seen_by_one", 0):
        for function in (model.without, model.forward, model.other):
            found = {names for _, _, names in library_state.library_state(function)}
            assert found == ({("seen_by_one",)} if function is not model.without else set())
    ours = [name for name in parsed if name.startswith("one_")]
    assert ours == ["one_that_counts"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch.a = torch.b.c = 1", {"a", "c"}),
        ("torch.a += 1", {"a"}),
        ("for torch.a, (b.c, *d.e) in x: pass", {"a", "c", "e"}),
        ("with x as torch.a: pass", {"a"}),
        ("vars(torch)['a'] = torch.__dict__['b'] = c['d'] = 1", {"a", "b", "d"}),
        ("setattr(torch, 'a', 1)", {"a", "*"}),
        ("patch.setattr(torch, 'a', 1)", set()),
        ("def f(self): self.a = 1", {"a"}),
        ("class A:\n    def f(self, b): self.a = b; b.c = self", {"c"}),
        ("class A:\n    def f(self):\n        def g(): self.a = 1", {"a"}),
        ("torch.a == 1; x = torch.a", set()),
        ("x is 5; torch.a = 1", {"a"}),  # a warning that the import has shown
        ("x = (", set()),
    ],
)
def test_the_names_that_a_file_sets_are_found_without_its_tree(
    tmp_path: Path, text: str, expected: set[str]
) -> None:
    file = tmp_path / "script.py"
    file.write_text(text)
    assert names_set_in(str(file)) == expected
    assert {name for _, name in library_state._pairs_in(str(file))} <= expected
    assert code_of(str(file)).co_filename == str(file)
