"""What a checkpoint saves: objects with a state_dict, and lists and dicts of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

from instep.training.checkpoint.errors import CannotSaveError, OtherModelError
from instep.training.checkpoint.plain_loaders import StatefulLoader, track
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
    advice = "instep.shard(loader) has them." if name == "loader" else "give it both."
    raise CannotSaveError.of_object(name, value, advice)


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
    """The states of objects."""
    return each_object(prepared, lambda value: value.state_dict())


def load_state(prepared: Any, state: Any, name: str, path: Path) -> None:
    """Load the states of objects. Raises OtherModelError with all that does not fit."""
    if isinstance(prepared, dict):
        _check_keys(prepared, state, name, path)
        for key, value in prepared.items():
            load_state(value, state[key], f"{name}[{key!r}]", path)
        return
    if isinstance(prepared, nn.Module):
        _check_model(prepared, state, name, path)
    try:
        prepared.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OtherModelError.of_state(path, name, error) from error


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
