"""The oracle of every training test: one process on the whole batch.

A training is a module-level function `training(log, *args)` that trains as a user's script does and
hands its steps to `log`. `same_as_one_process` plays it on one rank and on N, where each of the
first steps starts from the oracle's own models, and compares

(a) the gradient of each of these steps, over its norm;
(b) the loss curve;
(c) the final parameters, over the distance that training moved them: they may differ by rounding,
    or else by the training's own noise (one process against itself with the rows of each batch in
    reverse order, or from parameters that differ by 1e-7, where the order matters to it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import instep
from pool import run

PINNED_STEPS = 5
GRADIENT = {torch.float32: 5e-6, torch.float64: 1e-13}
LOSS = {torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass
class Course:
    """What one rank saw of a training."""

    gradients: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    start: Tensor | None = None

    @property
    def end(self) -> Tensor:
        return flat(self.states[-1].values())


class Log:
    """What a training tells: its losses and its steps."""

    def __init__(self, pin: list[dict[str, Tensor]] | None, reverse: bool, nudge: bool) -> None:
        self.course = Course()
        self._pin = pin
        self._reverse = reverse
        self._nudge = nudge

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches (in the noise run, each in reverse order)."""
        for batch in loader:
            yield tree_map(lambda t: t.flip(0), batch) if self._reverse else batch

    def begin(self, *models: nn.Module) -> None:
        """The models are built (in the nudged run, a little differently)."""
        if self._nudge:
            for parameter in (p for model in models for p in model.parameters()):
                parameter.data.mul_(1 + 1e-7)

    def loss(self, loss: Tensor, count: int | None = None) -> None:
        """The loss of this rank's rows, a mean over `count` of them."""
        mean = instep.Mean()
        mean.update(loss, count or 1)
        self.course.losses.append(mean.compute())

    def step(self, optimizer: torch.optim.Optimizer, *models: nn.Module, **kwargs: Any) -> None:
        """Take the optimizer's step, for models whose gradients are ready."""
        course = self.course
        if course.start is None:
            course.start = flat(_state(models).values())
        course.gradients.append(
            flat(
                torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                for model in models
                for p in model.parameters()
            )
        )
        optimizer.step(**kwargs)
        if self._pin is not None and len(course.states) < len(self._pin):
            for model, key in ((m, f"{k}.") for k, m in enumerate(models)):
                pinned = self._pin[len(course.states)]
                model.load_state_dict(
                    {n.removeprefix(key): t for n, t in pinned.items() if n.startswith(key)}
                )
        course.states.append(_state(models))


def _state(models: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    return {
        f"{k}.{name}": tensor.detach().cpu().clone()
        for k, model in enumerate(models)
        for name, tensor in model.state_dict().items()
    }


def flat(tensors: Iterable[Tensor]) -> Tensor:
    parts = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
    return torch.cat([part.cpu().double().reshape(-1) for part in parts])


def play(
    training: Callable[..., None],
    args: tuple[Any, ...],
    pin: list[dict[str, Tensor]] | None = None,
    reverse: bool = False,
    nudge: bool = False,
) -> Course:
    """Run a training on this rank."""
    torch.manual_seed(0)
    log = Log(pin, reverse, nudge)
    training(log, *args)
    assert log.course.states, "the training took no step"
    return log.course


@dataclass(frozen=True)
class Sameness:
    """The three differences of N ranks to one process."""

    gradient: float
    loss: float
    parameters: float


def compare(training: Callable[..., None], args: tuple[Any, ...] = (), size: int = 2) -> Sameness:
    """Play a training on one rank and on `size`, and measure."""
    (oracle,) = run(1, play, training, args)
    return _compare(training, args, size, oracle)


def _compare(
    training: Callable[..., None], args: tuple[Any, ...], size: int, oracle: Course
) -> Sameness:
    steps = len(oracle.states)
    pinned = min(steps, PINNED_STEPS)
    courses = run(size, play, training, args, pin=oracle.states[: pinned - 1])
    assert all(len(course.states) == steps for course in courses), "number of steps"
    return Sameness(
        gradient=max(
            ((theirs - ours).norm() / ours.norm()).item()
            for course in courses
            for theirs, ours in zip(
                course.gradients[:pinned], oracle.gradients[:pinned], strict=True
            )
        ),
        loss=max(
            (abs(a - b) for c in courses for a, b in zip(c.losses, oracle.losses, strict=True)),
            default=0.0,
        ),
        parameters=max(_distance(course, oracle) for course in courses),
    )


def _distance(course: Course, oracle: Course) -> float:
    """Between the final parameters, over the distance that training moved them."""
    return ((course.end - oracle.end).norm() / (oracle.end - oracle.start).norm()).item()


def same_as_one_process(
    training: Callable[..., None],
    *args: Any,
    sizes: Iterable[int] = (2, 3),
    dtype: torch.dtype = torch.float32,
    nudge: bool = False,
) -> None:
    """Assert that `training(log, *args)` has the numbers of one process on each of `sizes`."""
    (oracle,) = run(1, play, training, args)
    noise: float | None = None
    rounding = 1e-5 if dtype == torch.float32 else 1e-11 if nudge else 1e-13
    for size in sizes:
        sameness = _compare(training, args, size, oracle)
        assert sameness.gradient <= GRADIENT[dtype], (size, sameness)
        assert sameness.loss <= LOSS[dtype], (size, sameness)
        if sameness.parameters > rounding:
            if noise is None:
                (noisy,) = run(1, play, training, args, reverse=not nudge, nudge=nudge)
                noise = _distance(noisy, oracle)
            assert sameness.parameters <= 10 * noise, (size, sameness, noise)
