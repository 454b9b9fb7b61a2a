"""Slurm's lists: what they stand for, and what is none."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.distributed.identity.nodelist import count_tasks, expand_hosts
from instep.errors import LaunchVariablesError

WORDS = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("n[1-2]-ib,gpu[3,5],10.0.0.7", ["n1-ib", "n2-ib", "gpu3", "gpu5", "10.0.0.7"]),
        ("rack[1-2]n[0-1]", ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
    ],
)
def test_a_list_of_hosts_is_written_out(text, names):
    assert list(expand_hosts(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "n[",
        "n]",
        "n[1-3",
        "n[]",
        "n[3-1]",
        "n[a-b]",
        "n[1-]",
        "n[1,,2]",
        "n[[1]]",
        "a b",
        "n[1-2-3]",
    ],
)
def test_what_is_no_list_of_hosts_is_said(text):
    with pytest.raises(LaunchVariablesError, match="is not a list of hosts such as"):
        list(expand_hosts(text))


@given(st.lists(WORDS, min_size=1))
def test_plain_names_come_back_in_their_order(names):
    assert list(expand_hosts(",".join(names))) == names


@given(
    WORDS,
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_ranges_stand_for_every_number_in_them(prefix, ranges, width):
    texts = [f"{first:0{width}}-{first + more:0{width}}" for first, more in ranges]
    meant = [
        f"{prefix}{n:0{width}}" for first, more in ranges for n in range(first, first + more + 1)
    ]
    assert list(expand_hosts(f"{prefix}[{','.join(texts)}]")) == meant


@given(st.text(alphabet="a1[],- ", max_size=12))
def test_any_text_is_either_hosts_without_brackets_or_an_error(text):
    try:
        names = list(islice(expand_hosts(text), 100))
    except LaunchVariablesError:
        return
    assert names
    assert not any(set(name) & set("[], ") for name in names)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1))
def test_tasks_are_counted_for_each_host(runs):
    text = ",".join(f"{tasks}(x{times})" if times > 1 else f"{tasks}" for tasks, times in runs)
    meant = [tasks for tasks, times in runs for _ in range(times)]
    assert [count_tasks(text, node) for node in range(len(meant))] == meant
    with pytest.raises(LaunchVariablesError, match="does not say how many tasks this host has"):
        count_tasks(text, len(meant))


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "(x2)", "2,", "-1"])
def test_what_is_no_list_of_tasks_is_said(text):
    with pytest.raises(LaunchVariablesError, match="SLURM_STEP_TASKS_PER_NODE="):
        count_tasks(text, 9)
