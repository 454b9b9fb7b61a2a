"""What a checkpoint saves: objects with a state_dict, and lists and dicts of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instep.distributed.communication.transport import get_transport
from instep.distributed.generator_states import is_generator
from instep.training.buckets.reducer import partial_sums
from instep.training.checkpoint.errors import CannotSaveError, OtherModelError
from instep.training.checkpoint.plain_loaders import StatefulLoader, track
from instep.training.checkpoint.random_states import SavedGenerator
from instep.training.drift.optimizers import parameters_of
from instep.training.metrics import Metric
from instep.training.optimizer_shards.sharded_step import sharing_memory
from instep.training.shards import ShardedLoader


def prepare(value: Any, name: str) -> Any:
    """The object whose state is that of `value`; of lists and dicts, a dict of such objects.

    It is the model itself without DistributedDataParallel or torch.compile around it, so that
    names have no prefix. Raises CannotSaveError.
    """
    if isinstance(value, list | tuple | dict) and not hasattr(value, "state_dict"):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {str(key): prepare(each, f"{name}[{key!r}]") for key, each in items}
    if isinstance(value, nn.Module):
        return unwrap(value)
    if callable(getattr(value, "persistent", None)):  # torchmetrics saves nothing otherwise
        value.persistent(True)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        is_own = isinstance(value, DataLoader) and not isinstance(value, ShardedLoader)
        return StatefulLoader(value) if is_own else value
    if isinstance(value, DataLoader):
        return track(value)
    if is_generator(value):
        return SavedGenerator(value)
    advice = "instep.shard(loader) has them." if name == "loader" else "give it both."
    raise CannotSaveError(
        f"{name} is a {type(value).__name__}, which has no state_dict() and load_state_dict(); "
        f"{advice}"
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The script's own module."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # torch.compile's
            model = getattr(model, "_orig_mod")  # noqa: B009  # nn.Module types no attribute
        else:
            return model


def each_object(prepared: Any, visit: Callable[[Any], Any]) -> Any:
    """`visit(object)` of each object, in dicts like those of `prepare`."""
    if isinstance(prepared, dict):
        return {key: each_object(value, visit) for key, value in prepared.items()}
    return visit(prepared)


def state_of(prepared: Any) -> Any:
    """The states of objects, whose tensors may be those of the objects."""
    with sharing_memory():
        return each_object(prepared, lambda value: value.state_dict())


def load_state(prepared: Any, state: Any, name: str, path: Path) -> None:
    """Load the states of objects, which may keep the tensors of `state`.

    Raises OtherModelError with all that does not fit.
    """
    if isinstance(prepared, dict):
        _check_keys(prepared, state, name, path)
        for key, value in prepared.items():
            load_state(value, state[key], f"{name}[{key!r}]", path)
        return
    if isinstance(prepared, nn.Module):
        _check_model(prepared, state, name, path)
    try:
        with sharing_memory():
            prepared.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise OtherModelError(f"{path}: {name} does not take its state: {why}") from error


def metrics_of_rank(prepared: Any, saved: list[Any], path: Path) -> Any:
    """This rank's metrics: its own totals, or at another number of ranks all of them on rank 0."""
    transport = get_transport()
    if len(saved) == transport.size:
        return saved[transport.rank]
    if isinstance(prepared, dict):
        return {
            key: metrics_of_rank(each, [state[key] for state in saved], path)
            for key, each in prepared.items()
        }
    if not isinstance(prepared, Metric):
        raise CannotSaveError(
            f"{path} has the states that a {type(prepared).__name__} had on {len(saved)} ranks, "
            f"and there are {transport.size} now. Only an instep.Metric can be divided otherwise; "
            f"resume at {len(saved)} ranks."
        )
    totals = torch.stack([state["totals"] for state in saved]).sum(0)
    return {"totals": totals if transport.rank == 0 else torch.zeros_like(totals)}


class PendingGrads:
    """Gradients that were added up since the last step of these optimizers (accumulation)."""

    def __init__(self, optimizers: Any) -> None:
        """`optimizers`: as `prepare` returns them; what is no torch.optim.Optimizer has none."""
        self._optimizers: list[Optimizer] = []
        self._at_step: list[tuple[ref[Tensor], int]] = []
        """The gradients after the last step, and how often each had been changed."""
        each_object(optimizers, self._follow)

    def state(self) -> list[Any]:
        """The gradients over the rows of all ranks, by parameter; empty if none are pending.

        Collective inside of `instep.no_sync`.
        """
        parts = {id(parameter) for parameter in partial_sums()}
        if not parts and self._are_those_of_step(self._grads()):
            return []
        grads = [_whole_grad(each, is_part=id(each) in parts) for each in self._parameters()]
        if not any(grad is not None and grad.any() for grad in grads):
            return []
        return [
            _sparse_parts(grad) if grad is not None and grad.is_sparse else grad for grad in grads
        ]

    def load_state(self, state: list[Any]) -> None:
        """Let the next backward add to these gradients."""
        if len(state) != len(parameters := self._parameters()):
            return
        for parameter, saved in zip(parameters, state, strict=True):
            grad = (
                torch.sparse_coo_tensor(*saved, check_invariants=False)
                if isinstance(saved, list)
                else saved
            )
            parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)

    def _follow(self, optimizer: Any) -> None:
        if isinstance(optimizer, Optimizer):
            self._optimizers.append(optimizer)
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: object) -> None:
        self._at_step = [(ref(grad), grad._version) for grad in self._grads()]

    def _are_those_of_step(self, grads: list[Tensor]) -> bool:
        return len(grads) == len(self._at_step) and all(
            grad is at_step() and grad._version == version
            for grad, (at_step, version) in zip(grads, self._at_step, strict=True)
        )

    def _grads(self) -> list[Tensor]:
        return [grad for each in self._parameters() if (grad := each.grad) is not None]

    def _parameters(self) -> list[Tensor]:
        return [each for optimizer in self._optimizers for each in parameters_of(optimizer)]


def _whole_grad(parameter: Tensor, *, is_part: bool) -> Tensor | None:
    """The gradient of a parameter over the rows of all ranks."""
    grad = parameter.grad
    if grad is not None and is_part:
        grad = grad.clone()
        get_transport().all_reduce(grad, "sum").wait()
    return grad


def _sparse_parts(grad: Tensor) -> list[Any]:
    """What torch.sparse_coo_tensor makes a gradient of."""
    grad = grad.coalesce()
    return [grad.indices(), grad.values(), list(grad.shape)]


def _check_keys(prepared: dict[str, Any], state: Any, name: str, path: Path) -> None:
    saved = list(state) if isinstance(state, dict) else []
    if saved != list(prepared):
        missing = [key for key in prepared if key not in saved]
        unexpected = [key for key in saved if key not in prepared]
        raise OtherModelError.of_names(path, name, missing, unexpected, [])


def _check_model(model: nn.Module, state: dict[str, Any], name: str, path: Path) -> None:
    own = model.state_dict()
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {_shape(state[key])}, here {_shape(value)}"
        for key, value in own.items()
        if key in state and _shape(state[key]) != _shape(value)
    ]
    if missing or unexpected or shapes:
        raise OtherModelError.of_names(path, name, missing, unexpected, shapes)


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else None
