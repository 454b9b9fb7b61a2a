"""What `make mutants` changes, and what it leaves alone. Pure."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutation"))

import drawing
import mapping
import operators
import touched


def changes(source):
    """Every change of a function's body, as the line it leaves."""
    text = "def f(a, b):\n" + "".join(f"    {line}\n" for line in source.splitlines())
    found = []
    for mutant in operators.mutants("some.py", text.encode()):
        changed = mutant.applied(text.encode())
        if changed is not None:
            assert changed.count(b"\n") == text.count("\n"), "lines stay where they are"
            found.append(changed.decode().splitlines()[mutant.line - 1].strip())
    return set(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("g(a)", {"pass"}),
        ("a = g(a, b)", {"pass", "a = (g(b, a))"}),
        ("return a < b", {"return None", "return (a <= b)"}),
        ("return a is not None", {"return None", "return (a is None)"}),
        ("return max(a, b)", {"return None", "return (min)(a, b)"}),
        ("a += 2", {"pass", "a -= 2", "a += (3)"}),
        ("a = not b", {"pass", "a = (b)"}),
        ("a = b and a", {"pass", "a = (b or a)"}),
        ("a = g(k=b)", {"pass", "a = (g())"}),
        ("if a:\n    g()", {"if (True):", "if (False):", "pass"}),
        ("for a in b:\n    break", {"for a in (()):", "continue"}),
        ("while a:\n    continue", {"while (False):", "break"}),
        ("with a:\n    del b", {'with (__import__("contextlib").nullcontext()):', "pass"}),
        ("return a[1:b]", {"return None", "return a[(2):b]", "return a[:b]", "return a[1:]"}),
        ("return [a for a in b if a]", {"return None", "return [a for a in b if (True)]"}),
        ("a = zip(b, strict=True)", {"pass"}),
        ("a = g(k=True)", {"pass", "a = (g())", "a = g(k=(False))"}),
        ("raise ValueError(a + b)", {"pass"}),
        ("raise AssertionError(a)", set()),
        ("assert a == 1", set()),
        ("'some words'", set()),
        ("return None", set()),
    ],
)
def test_one_thing_is_changed_at_a_time(source, expected):
    assert changes(source) == expected


def test_what_nobody_could_tell_is_left_alone():
    source = b"""
from typing import TYPE_CHECKING
__all__ = ["f"]
A_SECONDS = 0.1 + 1
if TYPE_CHECKING:
    g()
class C:
    @overload
    def f(self, a=1): ...
    def __repr__(self):
        return "C" * 2
"""
    assert operators.mutants("some.py", source) == []


def test_of_each_package_as_many_are_drawn_as_it_has_lines():
    assert drawing.shares({"a": 10, "b": 20, "c": 1}, 300) == {"a": 96, "b": 194, "c": 10}
    root = mapping.ROOT
    files = {package: mapping.sources(package)[-3:] for package in ("training", "distributed/shm")}
    drawn = drawing.draw(root, files, 10, seed=4)
    assert len(set(drawn)) == 10
    assert set(drawn) <= set(drawing.draw(root, files, 20, seed=4)), "more are the same and more"
    assert drawn != drawing.draw(root, files, 10, seed=5)


def test_every_statement_of_a_function_says_that_it_was_reached():
    source = 'def f(n):\n    """Says."""\n    if n:\n        return 1\n    n = 2\n    return n\n'
    sites = []
    text = touched.instrument("some.py", source.encode(), sites).decode()
    assert [site.text for site in sites] == ["if n:", "return 1", "n = 2", "return n"]
    reached = [0] * len(sites)
    space = {"_touched_": reached}
    exec(text.replace("from instep._touched import _touched_", ""), space)
    assert space["f"](0) == 2
    assert reached == [1, 0, 1, 1]
    assert ast.parse(text)


def test_statements_are_found_again_when_lines_have_moved():
    line = {"test": "t.py::t", "seconds": 1.0, "outcome": "passed", "sites": [1]}
    sites = [
        {"path": "a.py", "function": "f", "text": "x = 1"},
        {"path": "a.py", "function": "f", "text": "y = 1"},
    ]
    other = line | {"test": "t.py::u", "sites": [0]}
    made = mapping.merged(
        {"sites": sites, "tests": [line]}, {"sites": sites[::-1], "tests": [other]}
    )
    known = mapping.Map(made)
    assert known.through("a.py", "f", "x = 1") == (set(), "statement")
    assert known.through("a.py", "f", "y = 1") == ({"t.py::t", "t.py::u"}, "statement")
    assert known.through("a.py", "f", "new = 1") == ({"t.py::t", "t.py::u"}, "function")
    assert known.through("a.py", "g", "new = 1") == ({"t.py::t", "t.py::u"}, "file")
