"""Branches by what Python computes from the rows of a tensor: they are those of the whole batch."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import instep
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.compare.probes.branches import makes_difference
from instep.unedited.sharded_call.compare.probes.function_rows import FunctionRows
from instep.unedited.sharded_call.compare.probes.row_kinds import ROWS, position_of
from pool import ranks
from sharded_training import Around, batches, sharding

BY_ALL_ROWS = [
    "if len(set(labels)) == 1: x = 2 * x",
    "n = Counter(labels).most_common(1)[0][1]\nif n > 8: x = x / n",
    "if max(labels) > 5: x = 2 * x",
    "if 7 in labels: x = x + 1",
    "if any(k > 6 for k in labels): x = x + 1",
    "chosen = [i for i, k in enumerate(labels) if k == 3]\nif len(chosen) > 8: x = x + 1",
    "counts = Counter(labels)\nw = [1.0 if counts[k] < 8 else 0.5 for k in labels]",
    "scale = min(1.0, 8 / sum(k == 3 for k in labels))",
    "while labels[0] > 3: x = x / 2",
    """
    groups = defaultdict(list)
    for i, k in enumerate(labels):
        groups[k].append(i)
    for k, places in groups.items():
        if len(places) > 8:
            x[places] = x[places].mean(0)
    """,
    """
    count = 0
    for k in labels:
        if k == 3:
            count += 1
        w.append(0.5 if count > 8 else 1.0)
    """,
    """
    last = -1
    for row, k in zip(x, labels):
        out.append(row / 2 if k == last else row)
        last = k
    """,
    """
    seen = set()
    for k in labels:
        w.append(0.0 if k in seen else 1.0)
        seen.add(k)
    """,
    """
    for i, k in enumerate(labels):
        if k == 7:
            break
        x[i] = x[i] / 2
    """,
    "pairs = [(i, j) for i in range(8) for j in range(i) if labels[i] == labels[j] == 9]",
    """
    for i in range(8):
        for j in range(i):
            if labels[i] == labels[j]:
                x[i] = x[j]
    """,
]
BY_ONE_ROW = [
    "for i, k in enumerate(labels):\n    x[i] = x[i] / 2 if k == 3 else x[i]",
    "w = [0.5 if k in (3, 4) else table[k] for k in labels]",
    "out = [row[:n] for row, n in zip(x, labels) if n > 0]",
    "for i in range(8):\n    if labels[i] > 2: x[i] = 0",
    "longest = max(labels)\nx = x[:, :longest]",
    "if max(labels) > 512: raise ValueError(labels)",
    "if len(labels) == 0: x = x + 1",
    "n = max(sum(k == 3 for k in labels), 1)",
    "chosen = [i for i, k in enumerate(labels) if k == 3]\nif chosen: x[chosen] = f(x[chosen])",
    """
    for row, k in zip(x, labels):
        n = k + 1
        if n > 3:
            row = row / n
        out.append(row)
    """,
]


def branches_in(text: str) -> list[int]:
    """The lines of a function's branches by what tells of all rows of `labels`."""
    lines = textwrap.indent(textwrap.dedent(text), "    ")
    node = ast.parse(f"def forward(x, labels):\n{lines}\n    return x").body[0]
    assert isinstance(node, ast.FunctionDef)
    found = FunctionRows("", node, {}, lambda called: None, {"labels": ROWS})
    return [branch.node.lineno for branch in found.branches if makes_difference(branch)]


@pytest.mark.parametrize("text", BY_ALL_ROWS)
def test_a_branch_by_what_tells_of_all_rows_is_found(text: str) -> None:
    assert branches_in(text)


@pytest.mark.parametrize("text", BY_ONE_ROW)
def test_a_branch_by_the_values_of_a_row_is_that_of_the_row(text: str) -> None:
    assert not branches_in(text)


def test_an_expression_has_the_place_that_its_instruction_has() -> None:
    node = ast.parse("a = (b +\n     c)").body[0]
    assert isinstance(node, ast.Assign)
    assert position_of(node.value) == (1, 2, 5, 6)


def is_rare(labels: list[int], limit: int = 8) -> bool:
    counts: dict[int, int] = {}
    for k in labels:
        counts[k] = counts.get(k, 0) + 1
    return max(counts.values()) > limit


class CentresWithOneLabel(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        if len(set(y.tolist())) == 1:
            scores = scores - scores.mean(0)
        return scores


class AsksAFunction(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores - scores.mean(0) if is_rare(y.tolist()) else scores


class AsksAPart(Around):
    def numbers(self, y: Tensor) -> list[int]:
        return [int(k) for k in y]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        if sum(self.numbers(y)) > 100:
            scores = scores * 2
        return scores


class AsksAnArray(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        if (y.numpy() == 3).sum() > 8:
            scores = scores / 2
        return scores


class GoesOverRows(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores, last = [], -1
        for row, label in zip(self.body(x), y, strict=True):
            k = int(label)
            scores.append(row / 2 if k == last and k > 5 else row)
            last = k
        return torch.stack(scores)


class ChangesRowsByTheirLabels(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = defaultdict(list)
        for i, k in enumerate(y.tolist()):
            places[k].append(i)
        counts = Counter(y.tolist())
        scores = [row * (2 if k > 1 else 1) for row, k in zip(self.body(x), y.tolist())]  # noqa: B905
        assert sum(counts.values()) == sum(map(len, places.values()))
        return torch.stack(scores)


class AsksTheFirstLabel(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores / 2 if y[0] == 9 else scores


class FollowsTheFirstLabel(Around):
    """No branch, but what is computed from a whole number."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return torch.where(y[0] == 9, scores / 2, scores)


class ReadsEachLabel(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.body(x)
        rows = [scores[i] / 2 if y[i] > 1 else scores[i] for i in range(len(y))]
        return torch.stack(rows)


class CallsExpertsOfLabels(Around):
    """Those that have rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        of_experts = F.one_hot(y, 4).T
        found = torch.zeros(len(x), 3, dtype=x.dtype)
        for expert in torch.greater(of_experts.sum(dim=-1), 0).nonzero():
            rows = of_experts[expert[0]].nonzero()[:, 0]
            found = found.index_add(0, rows, self.body(x[rows]) * (1 + int(expert)))
        return found


WHOLE = (
    *(CentresWithOneLabel, AsksAFunction, AsksAPart, AsksAnArray, GoesOverRows),
    *(AsksTheFirstLabel, FollowsTheFirstLabel),
)
DIVIDED = (ChangesRowsByTheirLabels, ReadsEachLabel, CallsExpertsOfLabels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WHOLE, *DIVIDED])
@ranks(2)
def test_a_branch_by_the_labels_of_all_rows_is_that_of_the_whole_batch(kind: type[Around]) -> None:
    torch.manual_seed(0)
    with sharding():
        for x, y in batches(2):
            kind().double()(x, y)
        assert modules.call_counts.sharded == (0 if kind in WHOLE else 2)


class FollowsTheFirstRow(Around):
    """Where it is large."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores * (1e4 / x[0].norm()).clamp(max=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FollowsTheFirstRow, Around])
@ranks(2)
def test_a_compiled_module_is_tried_as_it_is_written(kind: type[Around]) -> None:
    torch.manual_seed(0)
    inside = kind() if kind is not Around else kind().body
    model = torch.compile(inside.double(), backend="eager")
    with sharding() as log:
        for x, _ in batches(2):
            model(x)
        assert modules.call_counts.sharded == (0 if kind is FollowsTheFirstRow else 2)
    assert ("depend on each other" in log.getvalue()) == (
        kind is FollowsTheFirstRow and instep.rank == 0
    )
