"""The states of the generators of all ranks: the global ones, and those that the script gives."""

from __future__ import annotations

from typing import Any

from instep.distributed.communication.transport import get_transport
from instep.distributed.generator_states import hash_states, seed_generator, set_state, state_of
from instep.distributed.identity import torch_devices
from instep.training.random_streams import RNGStates, derive_seed, seed_all


def gather_states() -> list[dict[str, Any]]:
    """The states of all ranks' generators; one entry if they are all equal. Collective."""
    return _gather(_capture())


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    transport = get_transport()
    digests = transport.all_gather_object(hash_states(own.values()))
    return [own] if len(set(digests)) == 1 else transport.all_gather_object(own)


class SavedGenerator:
    """A generator of random numbers of the script: torch's, Python's or numpy's.

    Its state is saved once if it is equal on all ranks, as in a script for one process; otherwise
    each rank's. A rank that did not exist then gets a stream of its own.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. Collective."""
        return {"states": _gather({"state": state_of(self._generator)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the generator go on from this rank's state, or from that of all ranks."""
        states = state["states"]
        own = _of_this_rank(states)
        if own is None:
            seed_generator(self._generator, _new_seed(states))
        else:
            set_state(self._generator, own["state"])


def restore_states(states: list[dict[str, Any]]) -> None:
    """Set this rank's generators to its states, or to the ones that all ranks had.

    A rank that did not exist when they were different gets a stream of its own.
    """
    state = _of_this_rank(states)
    has_device = (state or states[0])["device"] is not None
    on_device = torch_devices.own_generator(begin=True) if has_device else None
    if state is None:
        seed = _new_seed(states)
        seed_all(seed)
        if on_device is not None:
            on_device.manual_seed(seed)  # seed_all is of the CPU's generators
        return
    RNGStates(**{name: state[name] for name in ("torch", "numpy", "python")}).restore()
    if on_device is not None:
        on_device.set_state(state["device"])


def _of_this_rank(states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """This rank's entry, or that of all ranks; None if the rank did not exist."""
    rank = 0 if len(states) == 1 else get_transport().rank
    return states[rank] if rank < len(states) else None


def _new_seed(states: list[dict[str, Any]]) -> int:
    """For a rank that did not exist: a seed of its own."""
    return derive_seed(hash_states(states[0].values()), get_transport().rank)


def _capture() -> dict[str, Any]:
    own = torch_devices.own_generator()
    return {
        **vars(RNGStates.capture()),
        "device": None if own is None else own.get_state(),
    }
