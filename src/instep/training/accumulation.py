"""Gradient accumulation: backwards that do not sum over the ranks until the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from instep.process.process_value import ProcessValue
from instep.training.batches import progress

T = TypeVar("T")

_sync = ProcessValue(True)


class _OpenSum:
    """The loop of `accumulate` that has a batch after which the optimizer does not step."""

    loop: object = None
    loaded = 0
    """How many batches had been loaded when it got it."""

    def begin(self, loop: object) -> None:
        """This loop has such a batch."""
        self.loop, self.loaded = loop, progress.current.loaded

    def end(self) -> None:
        """No loop has."""
        self.loop = None

    def is_open(self) -> bool:
        """Whether no other batch was loaded since. A loop that was left may live on."""
        return self.loop is not None and self.loaded == progress.current.loaded


_open_sum = _OpenSum()


@contextmanager
def no_sync() -> Iterator[None]:
    """Let backward accumulate this rank's gradients only; the next one outside sums them all.

    Between the two `.grad` is this rank's part of the sum. Saves messages in gradient accumulation;
    the gradient in the end is the same. Gradients with hooks of the script's own are summed in
    every backward: a hook runs once for each, and must see the sum.
    """
    with _sync.set_to(False):
        yield


def accumulate(loader: Iterable[T], steps: int) -> Iterator[tuple[T, bool]]:
    """The batches of `loader`, and after which the optimizer steps (gradient accumulation).

        for (x, y), is_last in instep.accumulate(loader, 4):
            loss = loss_function(model(x), y) / 4
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    The optimizer steps after every `steps` batches, and after the last batch of the loader, so that
    no gradient is left over. Gradients are summed over the ranks in the backwards before a step
    only: the others are as inside of `no_sync`, until a batch is requested from another loader with
    gradients enabled, or the loop is left. The gradient in the end is the same as without it.

    Args:
        loader: what `instep.shard` returned, or anything with a length.
        steps: the number of batches for each step of the optimizer.

    Raises ValueError for steps below 1, TypeError for a loader without a length.
    """
    if steps < 1:
        raise ValueError(f"steps is a number of batches, from 1 on, not {steps!r}.")
    try:
        total = len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{type(loader).__name__} has no length, so its last batch is not known before it is "
            "over. Use instep.no_sync, and step when the loop has ended."
        ) from None
    return _accumulate(loader, steps, total)


def _accumulate(loader: Iterable[T], steps: int, total: int) -> Iterator[tuple[T, bool]]:
    loop = object()
    try:
        for count, batch in enumerate(loader, start=1):
            count = getattr(loader, "batch_position", count)  # one that resumes begins in mid-epoch
            is_last = count % steps == 0 or count == total
            if is_last:
                _open_sum.end()
            else:
                _open_sum.begin(loop)
            yield batch, is_last
    finally:
        if _open_sum.loop is loop:
            _open_sum.end()


def is_summing() -> bool:
    """Whether backward sums gradients now."""
    return _sync.value and not _open_sum.is_open()
