"""The INSTEP_* variables: a value that does not fit, or a name that is misspelt, is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.distributed.identity import launchers
from instep.errors import LaunchVariablesError
from instep.process import settings

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("INSTEP_DEVICE", "foo", "INSTEP_DEVICE takes auto or cpu, not 'foo'."),
        ("INSTEP_LOAD", "foo", "INSTEP_LOAD takes auto, own or whole, not 'foo'."),
        ("INSTEP_WATCH", "maybe", "INSTEP_WATCH takes on or off, not 'maybe'."),
        ("INSTEP_BACKEND", "mpi", "INSTEP_BACKEND takes auto, gloo or shm, not 'mpi'."),
        ("INSTEP_BUCKET_MIB", "-1", "a whole number from 0 to 1048576, not '-1'."),
        ("INSTEP_TIMEOUT", "0", "a whole number from 1 to 2000000, not '0'."),
        ("INSTEP_TIMEOUT", "9" * 5000, "a whole number from 1 to 2000000, not '999"),
        ("INSTEP_TIMEOUT", "10 s", "a whole number from 1 to 2000000, not '10 s'."),
        ("INSTEP_SEED", "4294967296", "from 0 to 4294967295, not '4294967296'."),
        ("INSTEP_ARRIVAL_NOTICE", "2.5", "from 0 to 2000000, not '2.5'."),
        ("INSTEP_BACKND", "gloo", "no variable INSTEP_BACKND. Did you mean INSTEP_BACKEND?"),
        ("INSTEP_BUCKET_MB", "9", "Did you mean INSTEP_BUCKET_MIB?"),
        ("INSTEP_timeout", "9", "Did you mean INSTEP_TIMEOUT?"),
        ("INSTEP_OTHER", "9", "no variable INSTEP_OTHER. docs/variables.md lists what there is."),
    ],
)
def test_what_does_not_fit_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(LaunchVariablesError, match=re.escape(said)):
        settings.check_variables({"PATH": "/bin", name: value})


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {"INSTEP_DEVICE": "foo", "INSTEP_TIMEOUT": "0", "INSTEP_WATHC": "on"}
    with pytest.raises(LaunchVariablesError) as caught:
        settings.check_variables(wrong)
    assert all(name in str(caught.value) for name in wrong)


def test_what_fits_is_read() -> None:
    for setting in settings.SETTINGS:
        ends = [] if setting.numbers is None else [setting.numbers[0], setting.numbers[-1]]
        for value in (*setting.choices, *map(str, ends)):
            assert setting.read({setting.name: value}) == value
        assert setting.read({}) == setting.read({setting.name: ""}) == setting.default


def test_a_variable_is_checked_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_WATCH", "maybe")
    with pytest.raises(LaunchVariablesError, match="INSTEP_WATCH takes on or off"):
        str(settings.WATCH)


def test_every_variable_in_the_source_is_registered() -> None:
    used = {
        name
        for file in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\bINSTEP_[A-Z_]*[A-Z]\b", file.read_text())
    }
    assert used == settings.INTERNAL | {setting.name for setting in settings.SETTINGS}


def test_the_page_of_variables_has_them_all() -> None:
    rows = [
        f"| `{each.name}` | {each.domain} | {each.default or 'unset'} | {each.meaning} |"
        for each in settings.SETTINGS
    ]
    page = (ROOT / "docs" / "variables.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize("port", ["70000", "0", "-1"])
def test_a_port_that_is_none_is_an_error(port: str) -> None:
    with pytest.raises(LaunchVariablesError, match="MASTER_PORT takes a port from 1 to 65535"):
        launchers.master_port({"MASTER_PORT": port})
