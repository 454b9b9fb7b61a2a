"""DistributedOptimizer: an optimizer of torch's that steps with the ranks' average gradient."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.averaging import Averaging, Terms
from instep.compat.horovod.compression import Compression, Compressor
from instep.compat.horovod.errors import OutOfTurnError, UnsupportedOpError, WrongArgumentError
from instep.compat.horovod.ops import Adasum, Average, Sum, chosen
from instep.compat.horovod.session import session, size
from instep.compat.horovod.sets import ProcessSet, global_process_set

Closure = Callable[[], Any]
Groups = int | Sequence[Sequence[Tensor]]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer like `optimizer`, whose `step` uses the average of the ranks' gradients.

    Each rank counts alike, as in Horovod: the average of means over its rows. (Where
    `instep.shard` made the batches, a rank counts by its rows, and the gradient is that of the
    global batch.) Gradients travel while backward still runs.

    Args:
        optimizer: any of torch's. Its groups and state are shared, so schedulers made for it hold.
        named_parameters: `model.named_parameters()`: what ranks are matched by. All of the
            optimizer's, or None for names by position.
        compression: how gradients travel.
        backward_passes_per_step: after how many backwards they do; what these add up is not
            divided.
        op: Average, Sum, or Adasum (which combines whole steps).
        gradient_predivide_factor: with Average, what the gradients are divided by before the sum,
            and the sum multiplied by after it.
        num_groups: the old name of a number for `groups`.
        groups: what travels together: a number of groups, or lists of parameters.
        sparse_as_dense: let sparse gradients travel as dense ones.
        process_set: the ranks that take part; the others step by themselves.

    Returns:
        An instance of a class derived from `optimizer`'s, with `synchronize()`,
        `skip_synchronize()` and `set_backward_passes_per_step(n)`.

    Raises WrongArgumentError (a ValueError), UnsupportedOpError, NotInitializedError.
    """
    names = _names(optimizer, named_parameters)
    meant = chosen(op)
    if gradient_predivide_factor != 1.0 and meant != Average:
        raise WrongArgumentError.predivide()
    if meant not in (Average, Sum, Adasum):
        raise UnsupportedOpError("DistributedOptimizer", meant.name, ["Average", "Sum", "Adasum"])
    _check_passes(backward_passes_per_step)
    terms = Terms(
        compression,
        meant,
        gradient_predivide_factor,
        _checked_groups(groups if groups is not None else num_groups or None),
        sparse_as_dense,
        process_set,
    )
    kind = _Stepwise if meant == Adasum and size() > 1 else _Averaged
    cls: Any = type(type(optimizer).__name__, (kind, type(optimizer)), {})
    made = cls.__new__(cls)
    # A scheduler has replaced `step` of the instance that it was given.
    vars(made).update({name: v for name, v in vars(optimizer).items() if name != "step"})
    made._begin(_numbered(names) if named_parameters is None else names, terms)
    made.set_backward_passes_per_step(backward_passes_per_step)
    return made


class _Averaged(torch.optim.Optimizer):
    """What is put before the optimizer's own class."""

    def _begin(self, names: dict[Tensor, str], terms: Terms) -> None:
        self._parameter_names = names
        self._synchronized = False
        self._should_synchronize = True
        alone = size() == 1 or not terms.process_set.included()
        self._averaging = None if alone else Averaging(names, 1, terms)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """After how many backwards gradients travel, from the next step on."""
        _check_passes(passes)
        if self._averaging is not None:
            self._averaging.passes = passes

    def synchronize(self) -> None:
        """Wait until `.grad` holds the averages: before clipping, for example.

        Raises HorovodInternalError.
        """
        if self._averaging is not None:
            self._averaging.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside use `.grad` as it is: after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Closure | None = None) -> Any:
        """Wait for the averages, and step. With a closure: after each of its backwards."""
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
            elif not self._synchronized or self._under_way():
                self.synchronize()
            else:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are averages already and are used as "
                    "they are. Write `with optimizer.skip_synchronize():` around step().",
                    stacklevel=2,
                )
        self._synchronized = False
        return super().step(closure)

    def _synchronizing(self, closure: Closure) -> Closure:
        def synchronizing() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return synchronizing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises OutOfTurnError between backward and step or synchronize."""
        if self._under_way():
            raise OutOfTurnError.zero_grad()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; gradients under way are forgotten."""
        if self._averaging is not None:
            self._averaging.forget()
        super().load_state_dict(state_dict)

    def _under_way(self) -> bool:
        return self._averaging is not None and self._averaging.under_way


class _Stepwise(torch.optim.Optimizer):
    """Adasum: each rank steps by its own gradient, and the steps are combined."""

    def _begin(self, names: dict[Tensor, str], terms: Terms) -> None:
        self._parameter_names = names
        self._terms = terms

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients do not travel; accumulate as many as you like."""
        _check_passes(passes)

    def synchronize(self) -> None:
        """Nothing to wait for: `step` combines."""

    def skip_synchronize(self) -> Any:
        """Raises OutOfTurnError."""
        raise OutOfTurnError.skip_with_adasum()

    def step(self, closure: Closure | None = None) -> Any:
        """Step by this rank's gradient, and replace the step by all ranks' Adasum."""
        before = {p: p.detach().clone() for p in self._parameter_names if p.requires_grad}
        loss = super().step(closure)
        for dtype in dict.fromkeys(p.dtype for p in before):
            moved = [p for p in before if p.dtype == dtype]
            small = [self._terms.compression.compress(p.detach() - before[p]) for p in moved]
            reduction = self._terms.reduction(f"step of {len(moved)} parameters in {dtype}")
            steps = reduction.start([step for step, _ in small]).result()
            for p, step, (_, context) in zip(moved, steps, small, strict=True):
                whole = self._terms.compression.decompress(step, context)
                p.detach().copy_(before[p] + whole)
        return loss


def _names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Each parameter's name, in the optimizer's order."""
    if named is None:
        return {
            p: f"noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise WrongArgumentError.not_pairs()
    counts = Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise WrongArgumentError.same_names(twice)
    name_of = {p: name for name, p in pairs}
    all_of_it = [p for group in optimizer.param_groups for p in group["params"]]
    if unnamed := [tuple(p.shape) for p in all_of_it if p not in name_of]:
        raise WrongArgumentError.unnamed(unnamed)
    return {p: name_of[p] for p in all_of_it}


def _numbered(names: dict[Tensor, str]) -> dict[Tensor, str]:
    """Nameless parameters of the job's n-th such optimizer: two may be under way together."""
    number = session().unnamed["optimizer",]
    session().unnamed["optimizer",] += 1
    return {p: f"optimizer{number}.{name}" for p, name in names.items()}


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise WrongArgumentError.passes(passes)


def _checked_groups(groups: Groups | None) -> tuple[tuple[Tensor, ...], ...] | int | None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return groups
    if isinstance(groups, int) or not isinstance(groups, Iterable):
        raise WrongArgumentError.groups()
    made = tuple(tuple(group) for group in groups)
    every = [p for group in made for p in group]
    if not all(isinstance(p, Tensor) for p in every) or len({*every}) < len(every):
        raise WrongArgumentError.groups()
    return made
