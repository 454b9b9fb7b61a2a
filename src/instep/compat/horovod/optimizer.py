"""DistributedOptimizer: an optimizer that steps with the average of the ranks' gradients."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod import driver_client
from instep.compat.horovod.averaging import AveragingOptions, GradientAverager
from instep.compat.horovod.basics import ProcessSet, global_process_set, session, size
from instep.compat.horovod.compression import Compression, Compressor
from instep.compat.horovod.errors import CallOrderError, UnsupportedOpError, WrongArgumentError
from instep.compat.horovod.ops import Adasum, Average, Sum, parse_op
from instep.training.drift.optimizers import parameters_of

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
    global batch.) Gradients are sent while backward still runs.

    Args:
        optimizer: any of torch's. Its groups and state are shared, so schedulers made for it hold.
        named_parameters: `model.named_parameters()`: gradients are matched by these names. All
            of the optimizer's parameters, or None for names by position.
        compression: how gradients are sent.
        backward_passes_per_step: the number of backwards after which they are sent; the sum of
            these is not divided.
        op: Average, Sum, or Adasum (which combines whole steps).
        gradient_predivide_factor: with Average, the gradients are divided by it before the sum,
            and the sum is multiplied by it.
        num_groups: Horovod's older argument for a number of `groups`.
        groups: the parameters that are sent together: a number of groups, or lists of parameters.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that take part; the others step by themselves.

    Returns:
        An instance of a class derived from `optimizer`'s, with `synchronize()`,
        `skip_synchronize()` and `set_backward_passes_per_step(n)`, and with the arguments as
        attributes: `backward_passes_per_step`, `op`, `gradient_predivide_factor`,
        `sparse_as_dense`, `process_set`.

    Raises WrongArgumentError (a ValueError), UnsupportedOpError, NotInitializedError.
    """
    names = _names(optimizer, named_parameters)
    parsed = parse_op(op)
    if gradient_predivide_factor != 1.0 and parsed != Average:
        raise WrongArgumentError(
            "gradient_predivide_factor splits the factor of an average: leave op=Average."
        )
    if parsed not in (Average, Sum, Adasum):
        raise UnsupportedOpError("DistributedOptimizer", parsed.name, ["Average", "Sum", "Adasum"])
    _check_passes(backward_passes_per_step)
    options = AveragingOptions(
        compression,
        parsed,
        gradient_predivide_factor,
        _parse_groups(groups if groups is not None else num_groups or None),
        sparse_as_dense,
        process_set,
    )
    several = size() > 1 or driver_client.is_elastic()
    mixin = _AdasumOptimizer if parsed == Adasum and several else _AveragingOptimizer
    cls: Any = type(type(optimizer).__name__, (mixin, type(optimizer)), {})
    distributed = cls.__new__(cls)
    # A scheduler has replaced `step` of the instance that it was given.
    vars(distributed).update({name: v for name, v in vars(optimizer).items() if name != "step"})
    vars(distributed).update(
        op=parsed,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    distributed._begin(_add_number(names) if named_parameters is None else names, options)
    distributed.set_backward_passes_per_step(backward_passes_per_step)
    return distributed


class _AveragingOptimizer(torch.optim.Optimizer):
    """The base class that comes before the optimizer's own: its `step` waits for the averages."""

    def _begin(self, names: dict[Tensor, str], options: AveragingOptions) -> None:
        self._parameter_names = names
        self._synchronized = False
        self._should_synchronize = True
        may_grow = driver_client.is_elastic()
        single_rank = (size() == 1 and not may_grow) or not options.process_set.included()
        self._averager = None if single_rank else GradientAverager(names, 1, options)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Send gradients after this number of backwards, from the next step on."""
        _check_passes(passes)
        self.backward_passes_per_step = passes
        if self._averager is not None:
            self._averager.passes = passes

    def synchronize(self) -> None:
        """Wait until `.grad` holds the averages; needed before clipping, for example.

        Raises HorovodInternalError.
        """
        if self._averager is not None:
            self._averager.wait()
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
            elif not self._synchronized or self._has_pending():
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

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps it otherwise: hooks would run twice

    def _synchronizing(self, closure: Closure) -> Closure:
        def synchronizing() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return synchronizing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises CallOrderError between backward and step or synchronize."""
        if self._has_pending():
            raise CallOrderError(
                "zero_grad() between backward() and step() or synchronize(): the gradients are "
                "being averaged right now. Call it after step(), or before backward()."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; drops gradients under way."""
        if self._averager is not None:
            self._averager.reset()
        super().load_state_dict(state_dict)

    def _has_pending(self) -> bool:
        return self._averager is not None and self._averager.has_pending


class _AdasumOptimizer(torch.optim.Optimizer):
    """Each rank steps by its own gradient, and the steps are combined by Adasum."""

    def _begin(self, names: dict[Tensor, str], options: AveragingOptions) -> None:
        self._parameter_names = names
        self._options = options

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number only: gradients are not sent, so any number may be accumulated."""
        _check_passes(passes)
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: `step` combines the steps."""

    def skip_synchronize(self) -> Any:
        """Raises CallOrderError."""
        raise CallOrderError(
            "skip_synchronize() has no meaning with Adasum, which combines whole steps."
        )

    def step(self, closure: Closure | None = None) -> Any:
        """Step by this rank's gradient, and replace the step by all ranks' Adasum."""
        before = {p: p.detach().clone() for p in self._parameter_names if p.requires_grad}
        loss = super().step(closure)
        for dtype in dict.fromkeys(p.dtype for p in before):
            stepped = [p for p in before if p.dtype == dtype]
            small = [self._options.compression.compress(p.detach() - before[p]) for p in stepped]
            reduction = self._options.reduction(f"step of {len(stepped)} parameters in {dtype}")
            steps = reduction.start([step for step, _ in small]).result()
            for p, step, (_, context) in zip(stepped, steps, small, strict=True):
                whole = self._options.compression.decompress(step, context)
                p.detach().copy_(before[p] + whole)
        return loss

    step.hooked = True  # type: ignore[attr-defined]


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
        raise WrongArgumentError(
            "named_parameters is a sequence of pairs (name, parameter), such as "
            "model.named_parameters()."
        )
    counts = Counter(name for name, _ in pairs)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise WrongArgumentError(
            f"ranks are matched by parameter names, and these occur more than once: "
            f"{', '.join(duplicates)}. Put something before the names of each model."
        )
    name_of = {p: name for name, p in pairs}
    parameters = parameters_of(optimizer)
    if shapes := [tuple(p.shape) for p in parameters if p not in name_of]:
        raise WrongArgumentError(
            "named_parameters does not name every parameter of the optimizer; without a name are "
            f"those of shape {', '.join(map(str, shapes))}. Name all of them, or none."
        )
    return {p: name_of[p] for p in parameters}


def _add_number(names: dict[Tensor, str]) -> dict[Tensor, str]:
    """Names by position, of the job's n-th such optimizer: two may be under way together."""
    number = session().unnamed["optimizer",]
    session().unnamed["optimizer",] += 1
    return {p: f"optimizer{number}.{name}" for p, name in names.items()}


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise WrongArgumentError(
            f"backward_passes_per_step is a whole number from 1 up, not {passes!r}."
        )


def _parse_groups(groups: Groups | None) -> tuple[tuple[Tensor, ...], ...] | int | None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return groups
    if isinstance(groups, int) or not isinstance(groups, Iterable):
        raise WrongArgumentError.groups()
    lists = tuple(tuple(group) for group in groups)
    members = [p for group in lists for p in group]
    if not all(isinstance(p, Tensor) for p in members) or len({*members}) < len(members):
        raise WrongArgumentError.groups()
    return lists
