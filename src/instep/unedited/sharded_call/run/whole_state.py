"""What every rank computes whole on an accelerator stays the same on all ranks, to the bit.

Kernels of accelerators may add in another order each time. So after a backward, the gradients that
every rank has computed whole, and what else the modules hold that were called whole, are those of
rank 0: parameters would drift apart otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.identity import torch_devices
from instep.process import in_main_thread
from instep.process.torch_private.compiler import skip_frame
from instep.training.pytree import find_tensors
from instep.unedited.sharded_call.run.region import find_whole_leaves

_called: dict[int, weakref.ref[nn.Module]] = {}
"""The modules that were called whole since the last backward, by their ids, in this order.
No weak dictionary: torch.compile would take up its methods, beside what the script compiles."""
_changing: dict[int, weakref.ref[nn.Module]] = {}
"""Modules whose forward changes their parameters."""
_of_nested: list[Tensor] = []
"""The leaves of backwards that ran inside of the one under way, as of reentrant checkpoints."""


def note_whole_call(module: nn.Module) -> None:
    """Every rank calls this module, which is on an accelerator, whole."""
    if module.training:
        _called[id(module)] = weakref.ref(module)


skip_frame(note_whole_call)  # where a call breaks a graph, torch.compile would take this up


def note_changed_parameters(module: nn.Module) -> None:
    """A forward of this module changes its parameters."""
    _changing[id(module)] = weakref.ref(module)


def note_nested(roots: Iterable[Any]) -> None:
    """Inside of a backward, another one begins at these roots."""
    if torch_devices.is_in_use():
        _of_nested.extend(find_whole_leaves(roots))


def broadcast_whole_part(roots: Iterable[Any], inputs: Any) -> AbstractContextManager[None]:
    """A backward from these roots runs inside, into the `.grad` of `inputs` if that is given. At
    the end what every rank has computed whole is overwritten with rank 0's. Collective."""
    if not torch_devices.is_in_use() or _cannot_communicate():
        return nullcontext()
    return _broadcasting(roots, inputs)


@contextmanager
def _broadcasting(roots: Iterable[Any], inputs: Any) -> Iterator[None]:
    _of_nested.clear()
    leaves = find_whole_leaves(roots)
    yield
    by_id = {id(leaf): leaf for leaf in (*leaves, *_of_nested)}
    _of_nested.clear()
    if inputs is not None:
        wanted = set(map(id, find_tensors(inputs)))
        by_id = {key: leaf for key, leaf in by_id.items() if key in wanted}
    called = [module for reference in _called.values() if (module := reference()) is not None]
    state = chain.from_iterable(map(_state_of, called))
    tensors = [leaf.grad for leaf in by_id.values()] + [x for x in state if id(x) not in by_id]
    _called.clear()
    found = {id(x): x for x in tensors if x is not None and _can_be_sent(x)}
    if found:
        broadcast_coalesced(list(found.values()))


def _cannot_communicate() -> bool:
    """Whether this backward is this rank's own, or recorded for replays without Python."""
    return is_rank_local() or not in_main_thread() or torch_devices.is_capturing_graph()


def _state_of(module: nn.Module) -> Iterator[Tensor]:
    """What its whole call may have changed."""
    yield from module.buffers()
    reference = _changing.get(id(module))
    if reference is not None and reference() is module:
        yield from module.parameters()


def _can_be_sent(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_cpu and not tensor.is_inference()
