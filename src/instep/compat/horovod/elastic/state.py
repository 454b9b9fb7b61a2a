"""The state of an elastic training: committed in memory, restored, and taken over from rank 0."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from instep.compat.horovod import driver_client
from instep.compat.horovod.basics import rank
from instep.compat.horovod.errors import HostsUpdatedInterrupt
from instep.compat.horovod.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

T = TypeVar("T")
_HANDLED = "TorchState, which keeps each attribute that has state_dict() and load_state_dict()"
_IN_ITS_PLACE = {
    "StateHandler": _HANDLED,
    "ModelStateHandler": _HANDLED,
    "OptimizerStateHandler": _HANDLED,
    "SamplerStateHandler": _HANDLED,
    "get_handler_registry": _HANDLED,
    "set_handler_registry": _HANDLED,
    "notification_manager": "state.check_host_updates()",
}
"""What is used instead of names that Horovod has and instep does not."""


def __getattr__(name: str) -> Any:
    if name in _IN_ITS_PLACE:  # an AttributeError would lose its text in `from ... import name`
        raise ImportError(
            f"Horovod's {name} does not exist in instep. In its place: {_IN_ITS_PLACE[name]}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class State:
    """The base class: commits, and changes of the hosts. A subclass has save, restore and sync."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
    ) -> None:
        """`bcast_object` gives every rank the object of rank 0."""
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []
        self._last_updated_timestamp = 0
        self.clear_host_updates()

    def commit(self) -> None:
        """Save the state in memory, to which a failure goes back; then `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank if the driver has told rank 0 of a change.

        Collective.
        """
        if not driver_client.is_elastic():
            return
        before, change = self._last_updated_timestamp, 0
        latest = before
        while not self._host_messages.empty():
            time, what = self._host_messages.get()
            if time > latest:
                latest, change = time, change | what
        before, latest, change = self._bcast_object((before, latest, change))
        self._last_updated_timestamp = latest
        if latest > before:
            raise HostsUpdatedInterrupt(skip_sync=change == driver_client.REMOVED)

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """The driver has told this rank of a change of the hosts. Called in a thread."""
        self._host_messages.put((timestamp, update_res))

    def clear_host_updates(self) -> None:
        """Forget the changes so far: this rank joins another world now."""
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these in every new world, before its ranks take over the state."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have met in a new world."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Adapt to a new world; does nothing here."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over the state of rank 0. Collective."""
        raise NotImplementedError


class ObjectState(State):
    """Python values, which are attributes of the state."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        """`kwargs`: the attributes with their first values."""
        self._saved_state = _copy_values(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Save the values."""
        self._saved_state = _copy_values({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Set the attributes to the values that were saved last."""
        for name, value in _copy_values(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take over and save the values that rank 0 saved last."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)


@runtime_checkable
class _Stateful(Protocol):
    """Samplers, schedulers, scalers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class TorchState(ObjectState):
    """Models, optimizers and other objects with a state_dict, and Python values.

    Everything is an attribute of the state under its name. One that is replaced by an assignment
    is saved at once.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """`kwargs`: several models, an ElasticSampler, `epoch=0`."""
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._stateful: dict[str, _Stateful] = {}
        values = {}
        for name, value in given.items():
            if isinstance(value, _Stateful):
                self._stateful[name] = value
                setattr(self, name, value)
            else:
                values[name] = value
        self._save_stateful()
        super().__init__(**values)

    def save(self) -> None:
        """Save everything in memory."""
        self._save_stateful()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last, in place."""
        for name, stateful in self._stateful.items():
            stateful.load_state_dict(copy.deepcopy(self._saved_dicts[name]))
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's state, and save it. Collective."""
        for stateful in self._stateful.values():
            if isinstance(stateful, nn.Module):
                broadcast_parameters(stateful.state_dict(), root_rank=0)
            elif isinstance(stateful, torch.optim.Optimizer):
                broadcast_optimizer_state(stateful, root_rank=0)
            else:
                stateful.load_state_dict(broadcast_object(stateful.state_dict()))
        self._save_stateful()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_stateful", ()) and self._stateful[name] is not value:
            self._stateful[name] = value
            self._saved_dicts[name] = copy.deepcopy(value.state_dict())

    def _save_stateful(self) -> None:
        self._saved_dicts = {
            name: copy.deepcopy(stateful.state_dict()) for name, stateful in self._stateful.items()
        }


def _copy_values(values: dict[str, T]) -> dict[str, T]:
    """Copies, so that a commit keeps the elements of a list; what cannot be copied is shared."""
    return {name: _copy_value(value) for name, value in values.items()}


def _copy_value(value: T) -> T:
    try:
        return copy.deepcopy(value)
    except Exception:  # of the script's value: a lock, a file, whatever its __deepcopy__ raises
        return value
