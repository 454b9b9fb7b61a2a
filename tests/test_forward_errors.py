"""Errors and warnings of divided calls: a script that catches an error goes on where all ranks
have it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launch

pytestmark = pytest.mark.slow

SCRIPT = """
    import torch, warnings
    from torch import nn

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("not a number")

    class Checked(nn.Linear):
        def forward(self, x):
            for _ in x[x.isnan()].tolist()[:1]:  # as `if x.isnan().any()`, of which a trial knows
                {then}
            return super().forward(x)

    torch.manual_seed(0)
    for rows in {rows}:
        model = Checked(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range({steps}):
            x = torch.randn(6, 4)
            if step in {bad}:
                x[{index}] = torch.nan
            optimizer.zero_grad()
            try:
                loss = model(x).square().mean()
                loss.backward()
            except ValueError:
                continue
            optimizer.step()
        print(f"{{model.weight.abs().sum():.5f}}")
"""


RAISES = 'raise ValueError("not a number")'


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, ("run",))
    yield launch
    launch.close()


DEFAULTS = {"then": RAISES, "rows": "(-1,)", "index": "rows"}


def write(launch: Launch, *trainings: dict[str, str]) -> Path:
    """A script that makes these, one after the other."""
    script = launch.folder / "train.py"
    texts = [textwrap.dedent(SCRIPT.format(**(DEFAULTS | parts))) for parts in trainings]
    script.write_text("".join(texts))
    return script


REFUSES = "return Refusing.apply(super().forward(x))"
WARNS = "warnings.warn(f'step {step}'); x = x.nan_to_num()"


def test_errors_skip_the_batches_of_one_process_and_warnings_are_its(launch: Launch) -> None:
    """An error of all ranks, and one of rank 1 alone; one of a backward, in a call that is not
    watched; a warning about rows of either rank, in a call that is made anew, and in one that is
    not watched."""
    script = write(
        launch,
        {"steps": "8", "bad": "(4, 6)", "rows": "(slice(None), -1)"},
        {"steps": "75", "bad": "(70,)", "rows": "(slice(None),)", "then": REFUSES},
        {"steps": "75", "bad": "(10, 70)", "index": "-(step // 70)", "then": WARNS},
    )
    one, two = (launch.run_forked("-n", count, script) for count in (1, 2))
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert one.stdout == two.stdout
    assert len(set(one.stdout.split())) == 4
    assert one.stderr.count("UserWarning: step ") == 2
    assert two.stderr.replace("[1] ", "") == one.stderr


REPEATED = """
    import warnings

    import torch
    from torch import nn

    class Warns(nn.Linear):
        def forward(self, x):
            warnings.warn("in a forward")
            return nn.functional.dropout(super().forward(x), 0.2, self.training)

    model = Warns(4, 3)
    criterion = nn.MSELoss()
    for step in range(6):
        warnings.warn("in the loop")
        outputs = model(torch.randn(6, 4))
        outputs.register_hook(lambda _: warnings.warn("in a backward", stacklevel=5))
        criterion(outputs, torch.zeros(6, 1)).backward()
        model.zero_grad()
    with torch.no_grad():
        model.eval()(torch.randn(6, 4))
"""


def test_a_warning_that_is_shown_once_for_a_line_is_shown_once(launch: Launch) -> None:
    script = launch.folder / "train.py"
    script.write_text(textwrap.dedent(REPEATED))
    one, two = (launch.run_forked("-n", count, script) for count in (1, 2))
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert one.stderr.count("UserWarning") == 4
    assert one.stderr.count("loss.py:") == 1
    assert two.stderr == one.stderr


def test_a_late_error_of_one_rank_ends_the_job_with_its_name(launch: Launch) -> None:
    """In a call that is not watched."""
    script = write(launch, {"steps": "80", "bad": "(70,)"})
    ended = launch.run_forked("-n", 2, script)
    assert ended.returncode == 1
    line = 1 + script.read_text().splitlines().index("            loss = model(x).square().mean()")
    culprit = f"barrier (ValueError in forward of Checked) at {script}:{line} on rank 1"
    assert culprit in ended.stderr
    assert ended.stdout == ""


def test_a_late_error_of_one_ranks_backward_ends_the_job_with_its_name(launch: Launch) -> None:
    script = write(launch, {"steps": "75", "bad": "(70,)", "then": REFUSES})
    ended = launch.run_forked("-n", 2, script)
    assert ended.returncode == 1
    assert "(ValueError in backward()) at " in ended.stderr, ended.stderr


def test_a_late_branch_for_some_rows_names_the_module(launch: Launch) -> None:
    script = write(
        launch, {"steps": "80", "bad": "(70,)", "then": "return super().forward(x).double()"}
    )
    ended = launch.run_forked("-n", 2, script)
    assert ended.returncode == 1
    assert "This was in a divided call of Checked." in ended.stderr


def test_a_late_branch_that_returns_fewer_rows_is_said(launch: Launch) -> None:
    script = write(launch, {"steps": "80", "bad": "(70,)", "then": "x = x[:2]"})
    ended = launch.run_forked("-n", 2, script)
    assert ended.returncode == 1
    assert "Checked has returned a tensor of shape [2, " in ended.stderr
