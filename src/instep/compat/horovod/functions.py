"""Broadcasts of parameters, of an optimizer's state and of Python objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn

from instep.compat.horovod.basics import ProcessSet, global_process_set, rank
from instep.compat.horovod.collectives.gather_broadcast import broadcast_async_
from instep.compat.horovod.collectives.handles import Handle, full_name, submit
from instep.compat.horovod.errors import WrongArgumentError
from instep.distributed.identity.torch_devices import current_device
from instep.distributed.negotiation.message_table import Response
from instep.distributed.rendezvous import signed_pickle
from instep.process.torch_private.tensors import tree_leaves, tree_map
from instep.training.drift.optimizers import parameters_of

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Tensor] | Sequence[Tensor] | Iterable[tuple[str, Tensor]], root_rank: int
) -> None:
    """Overwrite tensors with root's, in place.

    Args:
        params: `model.state_dict()`, or a list of tensors or of pairs (name, tensor).
        root_rank: the source.

    Raises WrongArgumentError for something else, and as `broadcast`.
    """
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, str | Tensor) or not isinstance(params, Iterable):
        raise WrongArgumentError(
            "broadcast_parameters takes model.state_dict(), or a list of tensors or of pairs "
            f"(name, tensor), not {type(params).__name__}."
        )
    else:
        pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    handles = [
        broadcast_async_(tensor, root_rank, name)
        for name, tensor in pairs
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        handle.result()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None
) -> None:
    """Give every rank's optimizer the options and the state of root's.

    Args:
        optimizer: of torch, or a DistributedOptimizer; LBFGS too.
        root_rank: the source.
        model: not needed.

    Raises as `broadcast`.
    """
    own = optimizer.state_dict()
    specs = broadcast_object(tree_map(_to_spec, own), root_rank, name="optimizer_state")
    state = own if rank() == root_rank else tree_map(_from_spec, specs)
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    broadcast_parameters([(f"optimizer_state.{k}", t) for k, t in enumerate(tensors)], root_rank)
    if rank() != root_rank:
        _load(optimizer, state)
    if not tensors:
        _zero_gradients(optimizer)


@dataclass(frozen=True)
class _TensorSpec:
    """A tensor without its elements."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _to_spec(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    return _TensorSpec(leaf.shape, leaf.dtype, leaf.device.type)


def _from_spec(leaf: object) -> object:
    if not isinstance(leaf, _TensorSpec):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=current_device(leaf.device))


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """load_state_dict that keeps the groups, since schedulers hold these objects."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups = groups


def _zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set gradients of zero, as Horovod leaves them here after a step that makes the state.

    Scripts read them. There is no such step here: weight decay would change the parameters.
    """
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Root's object, pickled; on root the object itself. Functions without a name and classes of a
    function may be in it. Raises as `broadcast`."""
    sent = _dumps(obj) if rank() == root_rank else b""
    name = full_name("broadcast_object", name, process_set)
    handle = _gather_bytes(name, sent, process_set, root=root_rank)
    (received,) = (part for part in handle.result() if part)
    result: T = obj if rank() == root_rank else signed_pickle.loads(received)
    return result


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Every rank's object, pickled, in the order of ranks. Raises as `allgather`."""
    name = full_name("allgather_object", name, process_set)
    handle = _gather_bytes(name, _dumps(obj), process_set)
    return [signed_pickle.loads(part) for part in handle.result()]


def _dumps(obj: object) -> bytes:
    """The signed pickle of an object, by cloudpickle if it needs that: a class of the script that
    went through it would be another class."""
    try:
        content = pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        content = cloudpickle.dumps(obj)
    return signed_pickle.sign_pickle(content)


def _gather_bytes(
    name: str, sent: bytes, process_set: ProcessSet, root: int | None = None
) -> Handle:
    if root is not None and root not in process_set.members:
        raise WrongArgumentError.root(root, process_set.members)

    def finish(response: Response, results: list[Tensor]) -> list[bytes]:
        parts = results[0].split([rows[0] for rows in response.rows])
        return [part.numpy().tobytes() for part in parts]

    tensor = (
        torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        if sent
        else torch.empty(0, device="cpu")
    )
    return submit("allgather", name, [tensor.byte()], process_set, finish, root=root)
