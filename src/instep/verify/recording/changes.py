"""Changes in a run: pinned states, other rounding, reversed batches, no autocast, no instep."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.process.patching import Function, Patch, PatchHandle
from instep.process.torch_private.loaders import DataLoaderIterator
from instep.process.torch_private.tensors import tree_map
from instep.training import replicas, shards
from instep.training.drift.optimizers import parameters_of
from instep.training.optimizer_shards.sharded_step import DividedState
from instep.training.random_streams import SeededIndex
from instep.verify.recording.records import read_tensors

_SOME_ROUND_OTHERWISE = 1 / 32
"""Of a rounding unit: about one number in twenty is rounded to another one."""
_REMEMBERED = 256
"""Number of index lists of DataLoaders that are kept."""


def copy_state(
    optimizer: Optimizer, parameters: dict[str, Tensor], buffers: dict[str, Tensor]
) -> dict[str, Any]:
    """Copy to the CPU all that a step of `optimizer` may change."""
    return {
        "parameters": {name: p.detach().cpu().clone() for name, p in parameters.items()},
        "buffers": {name: b.detach().cpu().clone() for name, b in buffers.items()},
        "optimizer": {
            name: copy.deepcopy(optimizer.state[p])
            for name, p in parameters.items()
            if p in optimizer.state
        },
    }


def load_state(
    folder: Path,
    step: int,
    optimizer: Optimizer,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> None:
    """Load the state before `step` from the run in `folder`, as far as the names agree.

    Collective for a divided optimizer.
    """
    saved = read_tensors(folder, f"state{step}")
    with torch.no_grad():
        for kind, tensors in (("parameters", parameters), ("buffers", buffers)):
            for name, tensor in tensors.items():
                if name in saved.get(kind, {}):
                    tensor.copy_(saved[kind][name])
    states = {
        parameters[name]: state
        for name, state in saved.get("optimizer", {}).items()
        if name in parameters
    }
    if isinstance(optimizer.state, DividedState):
        _load_divided(optimizer, states)
        return
    for p, state in states.items():
        optimizer.state[p] = _on_devices_of(optimizer.state.get(p, {}), state, p.device)


def _load_divided(optimizer: Optimizer, states: dict[Tensor, Any]) -> None:
    """Give a divided optimizer the states of whole parameters."""
    whole = optimizer.state_dict()
    numbered = enumerate(parameters_of(optimizer))
    whole["state"] |= {number: states[each] for number, each in numbered if each in states}
    optimizer.load_state_dict(whole)


def _on_devices_of(current: dict[str, Any], state: dict[str, Any], device: torch.device) -> Any:
    """`state`, which is on the CPU, with each tensor where `current` has it; those that it does not
    have, on `device`. A count of steps is on the CPU, but for fused and capturable optimizers."""

    def place(key: str, value: Any) -> Any:
        now = current.get(key)
        there = now.device if isinstance(now, Tensor) else device
        return tree_map(lambda leaf: leaf.to(there) if isinstance(leaf, Tensor) else leaf, value)

    return {key: place(key, value) for key, value in state.items()}


def perturb(parameters: Iterable[Tensor], seed: int, half_precision: str = "") -> None:
    """Change each number by about one rounding error of its dtype, equally in every run.

    Where they are rounded to a dtype of half precision before they are used, that would change
    nothing: they change by so much that some of them round otherwise, as some of what several ranks
    compute from sums in another order does.
    """
    generator = torch.Generator().manual_seed(seed)
    half: torch.dtype | None = getattr(torch, half_precision) if half_precision else None
    least = _SOME_ROUND_OTHERWISE * torch.finfo(half).eps if half else 0.0
    with torch.no_grad():
        for tensor in parameters:
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            noise = torch.randn(
                numbers.shape, generator=generator, dtype=torch.float64, device="cpu"
            )
            factor = 1 + noise * max(torch.finfo(numbers.dtype).eps, least)
            numbers.copy_(numbers.double() * factor.to(numbers.device))


class IndexRecorder:
    """Records the samples that DataLoaders request; may reverse each batch."""

    def __init__(self, reverse: bool) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._reverse = reverse

    def install(self) -> None:
        """Install it in this process."""
        PatchHandle([Patch(DataLoaderIterator, "_next_index", self._next_index)])

    def _next_index(self, original: Function, loader: Any) -> Any:
        index = original(loader)
        if not isinstance(index, list) or not all(isinstance(i, int | SeededIndex) for i in index):
            return index
        if len(self.asked) < _REMEMBERED:
            self.asked.append(tuple(i.index if isinstance(i, SeededIndex) else i for i in index))
        return index[::-1] if self._reverse else index


_AUTOCAST_SWITCHES = ("set_autocast_enabled", "set_autocast_cpu_enabled")


def disable_autocast() -> None:
    """Let nothing switch autocast on in this process: a script computes in its tensors' dtypes."""

    def stay_off(original: Function, *args: Any, **kwargs: Any) -> None:
        device = [value for value in (*args, *kwargs.values()) if not isinstance(value, bool)]
        original(*device, False)

    PatchHandle([Patch(torch, name, stay_off) for name in _AUTOCAST_SWITCHES])


def disable_instep() -> None:
    """Let instep.replicate and instep.shard return their argument unchanged."""
    PatchHandle(
        [
            Patch(replicas, "replicate", lambda original, model, **options: model),
            Patch(shards, "shard", lambda original, what: what),
        ]
    )
