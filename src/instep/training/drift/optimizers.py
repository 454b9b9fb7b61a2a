"""The optimizers that step, and their hyper-parameters by the names of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from instep.distributed.flight_record.recorder import recorder
from instep.process.process_value import ProcessValue
from instep.process.torch_private.compiler import disable_compile

_stepped: dict[int, weakref.ref[Optimizer]] = {}
"""The optimizers that have stepped, by their ids; the last to begin is the last here."""
_hooks: list[RemovableHandle] = []
_before_step_call = ProcessValue[Callable[[Optimizer], None] | None](None)
_after_steps: list[Callable[[Optimizer], None]] = []

_NO_REPLICA = "which is in no replica: make it a part of the model, or call instep.replicate"
"""In the names of such parameters."""

_Value = bool | int | float | str | None | tuple[Any, ...]


def follow_optimizers() -> None:
    """From now on optimizers that step are known."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(disable_compile(_before_step)))
        _hooks.append(register_optimizer_step_post_hook(disable_compile(_after_step)))


def stop_following() -> None:
    """This process is the only one from now on: optimizers step without hooks."""
    while _hooks:
        _hooks.pop().remove()


def before_each_step(function: Callable[[Optimizer], None] | None) -> None:
    """Call `function(optimizer)` before every step of an optimizer; None: call nothing."""
    _before_step_call.value = function


def after_each_step(function: Callable[[Optimizer], None]) -> None:
    """Call `function(optimizer)`, too, after every step of an optimizer."""
    if function not in _after_steps:
        _after_steps.append(function)


def stepped_optimizers() -> list[Optimizer]:
    """The optimizers that have stepped and still exist."""
    known = {key: reference() for key, reference in _stepped.items()}
    for key, optimizer in known.items():
        if optimizer is None:
            del _stepped[key]
    return [optimizer for optimizer in known.values() if optimizer is not None]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all its groups, in order."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def named_options(names: Mapping[int, str]) -> dict[str, _Value]:
    """The hyper-parameters of optimizers that have stepped on the parameters of these ids.

    The keys name optimizer, first parameter of the group and hyper-parameter, so that they are the
    same on all ranks whatever else the ranks have. Where an optimizer has taken another's place,
    the later one's are here.
    """
    found: dict[str, _Value] = {}
    for optimizer in stepped_optimizers():
        for group in optimizer.param_groups:
            name = next((names[id(p)] for p in group["params"] if id(p) in names), None)
            if name is None:
                continue
            for option, value in group.items():
                if option != "params" and (plain := _as_value(value)) is not _UNKNOWN:
                    found[f"{option} of {type(optimizer).__name__} for {name}"] = plain
    return found


def other_parameters(ids: Container[int], known: Container[int]) -> dict[str, tuple[Tensor, bool]]:
    """Parameters that are not among `known`, of optimizers that have stepped, and whether their
    optimizer has a parameter of those with these ids; by names that are the same on all ranks."""
    beside: dict[str, tuple[Tensor, bool]] = {}
    apart: dict[str, tuple[Tensor, bool]] = {}
    for optimizer in stepped_optimizers():
        parameters = parameters_of(optimizer)
        is_beside = any(id(each) in ids for each in parameters)
        for index, parameter in enumerate(parameters):
            if id(parameter) not in known:
                name = f"parameter {index} of {type(optimizer).__name__} ({_NO_REPLICA})"
                (beside if is_beside else apart).setdefault(name, (parameter, is_beside))
    return apart | beside


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    known = _stepped.get(id(optimizer))
    if known is None or known() is not optimizer:
        _stepped.pop(id(optimizer), None)
        _stepped[id(optimizer)] = weakref.ref(optimizer)
    if _before_step_call.value is not None:
        _before_step_call.value(optimizer)
    recorder.set_phase("optimizer")


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recorder.set_phase("")
    for function in _after_steps:
        function(optimizer)
    if id(optimizer) == next(iter(_stepped), None):  # of several, one counts the steps
        recorder.count_step()


_UNKNOWN: Any = object()


def _as_value(value: object) -> Any:
    """A value that can be sent and compared; else _UNKNOWN."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else _UNKNOWN
    if isinstance(value, tuple | list):
        parts = tuple(map(_as_value, value))
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else parts
    return value if isinstance(value, bool | int | float | str | None) else _UNKNOWN
