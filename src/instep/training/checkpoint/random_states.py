"""The states of the generators of all ranks: the global ones, and those that the script gives."""

from __future__ import annotations

from typing import Any

import torch

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
        states, rank = state["states"], get_transport().rank
        if len(states) == 1:
            rank = 0
        if rank < len(states):
            set_state(self._generator, states[rank]["state"])
        else:
            seed_generator(self._generator, derive_seed(hash_states(states[0].values()), rank))


def restore_states(states: list[dict[str, Any]]) -> None:
    """Set this rank's generators to its states, or to the ones that all ranks had.

    A rank that did not exist when they were different gets a stream of its own.
    """
    rank = get_transport().rank
    if len(states) == 1:
        rank = 0
    if rank >= len(states):
        seed = derive_seed(hash_states(states[0].values()), rank)
        seed_all(seed)
        if states[0]["device"] is not None and (own := _own_generator()) is not None:
            own.manual_seed(seed)  # seed_all is of the CPU's generators
        return
    state = states[rank]
    RNGStates(**{name: state[name] for name in ("torch", "numpy", "python")}).restore()
    if state["device"] is not None and (own := _own_generator()) is not None:
        own.set_state(state["device"])


def _own_generator() -> torch.Generator | None:
    return torch_devices.own_generator(begin=True)


def _capture() -> dict[str, Any]:
    own = torch_devices.own_generator()
    return {
        **vars(RNGStates.capture()),
        "device": None if own is None else own.get_state(),
    }
