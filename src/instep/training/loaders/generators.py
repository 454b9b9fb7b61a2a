"""The generators that a loader of any class draws its order from, other than the global ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.objects import broadcast_object
from instep.distributed.generator_states import keep_in_step
from instep.distributed.rendezvous import bootstrap


def generators_of(loader: Any) -> list[torch.Generator]:
    """The loader's own generators, and those of its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [
        getattr(owner, "generator", None)
        for owner in (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
    ]
    kept: list[torch.Generator] = []
    for generator in found:
        if isinstance(generator, torch.Generator) and all(generator is not k for k in kept):
            kept.append(generator)
    return kept


def get_states(loader: Any) -> list[Tensor]:
    """The states of its generators."""
    return [generator.get_state() for generator in generators_of(loader)]


def set_states(loader: Any, states: list[Tensor]) -> None:
    """Set its generators to what `get_states` returned for such a loader."""
    for generator, state in zip(generators_of(loader), states, strict=True):
        generator.set_state(state)


def broadcast_states(loader: Any, sharded: object) -> None:
    """Let the generators of a loader be those of rank 0, also after one rank has drawn from them in
    a scope, as long as there is the loader that is `sharded` from it. Collective."""
    set_states(loader, broadcast_object(get_states(loader)))
    if not bootstrap.is_world_of_one():  # a scope, which other ranks are not in
        keep_in_step(sharded, generators_of(loader))
