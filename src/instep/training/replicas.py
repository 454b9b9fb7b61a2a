"""`instep.replicate`: a model with the same parameters on all ranks, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.objects import check_same_on_all_ranks
from instep.distributed.communication.scopes import scope_number
from instep.distributed.communication.tensors import check_reachable
from instep.distributed.communication.transport import Transport, get_transport
from instep.distributed.flight_record.recorder import set_phase
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.distributed.identity.torch_devices import is_capturing_graph
from instep.errors import TrainingError
from instep.process.patching import PatchHandle
from instep.process.torch_private.compiler import disable_compile
from instep.process.torch_private.modules import BatchNorm, Dropout
from instep.training import forward_calls, gradients, linear_layers
from instep.training.batches import progress
from instep.training.batches.registry import find_candidates, may_be_share
from instep.training.blocks import tensor_leaves
from instep.training.buckets.compression import Compression, check_compression
from instep.training.buckets.reducer import Reducer
from instep.training.buckets.sparse_sums import find_tables
from instep.training.draws import dropout_masks, functions
from instep.training.draws.batch_dims import BatchDims, script_place
from instep.training.draws.first_own_draw import find_first_own_draw
from instep.training.draws.replica_draws import draw_token
from instep.training.drift.comparison import Buffers, DriftCheck, drift_check_of
from instep.training.errors import CapturedStepError, ReplicatedTwiceError
from instep.training.forward_calls import ForwardCall, Scope, replica_of_part
from instep.training.losses.closures import follow_steps
from instep.training.normalization import batch_statistics
from instep.training.normalization.batch_statistics import statistics_of
from instep.training.random_streams import (
    RNGStates,
    broadcast_seed_and_states,
    default_generators,
    derive_seed,
    make_rng_state,
)
from instep.training.shards import check_bitwise

M = TypeVar("M", bound=nn.Module)


@dataclass(eq=False)
class Replica:
    """The state of a replicated model."""

    transport: Transport
    statistics: Scope
    dropout: Scope
    compression: Compression
    seed: int
    batch_dims: BatchDims
    """What is known of the random numbers that it draws."""
    steps: int = 0
    """The number of its calls in training with gradients, but for those in a scope."""
    has_warned: bool = False
    """Whether there was a warning of random numbers that each rank draws for itself."""
    has_new_parts: bool = False
    """Whether a parameter or a module was added since the last call."""
    other_states: RNGStates | None = None
    """The states of numpy's and Python's generators before its first call in training."""
    drift_check: DriftCheck | None = None
    """Compares it between the ranks; None in a world of one."""

    def call_of_method(self) -> ForwardCall:
        """A call for what one of its other methods draws."""
        return ForwardCall(
            find_candidates(()), dropout=self.dropout, replica=self, batch_dims=self.batch_dims
        )


_replica_of: WeakKeyDictionary[nn.Module, Replica] = WeakKeyDictionary()
"""Replicated models, without their parts."""
_copies: set[type] = set()
"""The classes of which a copy that trains was found."""
copy_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weak references to the float32 copies of parameters in half precision, by these."""


def replicate(
    model: M,
    *,
    batch_statistics: Scope = "global",
    dropout: Scope = "global",
    compression: Compression = None,
    bitwise: int | None = None,
) -> M:
    """Keep `model` the same on all ranks.

    Parameters and buffers become rank 0's. From now on every backward through the model leaves in
    `.grad` the gradient of the global batch (up to the rounding of sums in another order), batch
    normalisation in training uses the statistics of the global batch, and dropout masks depend on
    a sample's position in the global batch.

    Args:
        model: any module; on the rank's own device. The optimizer may exist already.
        batch_statistics: "global", or "rank" to leave batch statistics to each rank's rows, which
            is faster and not the same as one process.
        dropout: "global", or "rank" for masks that each rank draws for itself.
        compression: None, or what makes the gradients' messages smaller and `.grad` inexact:
            "bf16" or "fp16" send 16 bits for each number and add them up so (relative errors
            of `.grad` near 3e-3 and 3e-4; "fp16" overflows beyond 65504, as a scaled loss makes
            gradients do; the sums of hosts whose CPU ranks share memory are exact before they are
            sent), `instep.PowerSGD` a product of two thin matrices. Sparse gradients and those
            with hooks travel whole. docs/compression.md has measurements.
        bitwise: the number of virtual shards with which this script must have been started, by
            `instep run --bitwise V`; anything else is an error (docs/bitwise.md).

    Returns:
        `model` itself: no wrapper, no prefix in its state dict, its children untouched.

    Draws a seed from torch's generator. Warns of random numbers that it cannot make those of the
    whole batch (InstepWarning).
    Raises ReplicatedTwiceError, DisagreementError (a parameter differs in name, shape or dtype
    between ranks), WrongDeviceError, BitwiseError, TrainingError, ValueError for another
    `batch_statistics`, `dropout` or `compression` than these, and TypeError for no module.
    Collective.
    """
    check_bitwise(bitwise)
    for name, scope in (("batch_statistics", batch_statistics), ("dropout", dropout)):
        if scope not in get_args(Scope):
            raise ValueError(f"{name} is 'global' or 'rank', not {scope!r}.")
    check_compression(compression)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"instep.replicate takes a model (a torch.nn.Module), not {type(model).__name__}; "
            "loaders and optimizers are for instep.shard."
        )
    for name, module in model.named_modules():
        if module in replica_of_part:
            raise ReplicatedTwiceError(
                f"{name or 'the model'} ({type(module).__name__}) is already replicated; its "
                "gradients would be summed twice. Call instep.replicate once, on the outermost "
                "module."
            )
    transport = get_transport()
    seed, in_step = broadcast_seed_and_states()
    replica = Replica(
        transport,
        # On a single rank its rows are the batch, and torch's own kernels are the fastest.
        statistics=batch_statistics if transport.size > 1 else "rank",
        dropout=dropout,
        compression=compression,
        seed=seed,
        batch_dims=BatchDims(in_step),
    )
    _add_new_parts(model, replica)
    _replica_of[model] = replica
    model.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)
    _patch_torch()
    return model


def is_replicated(model: nn.Module) -> bool:
    """Whether `model` or a part of it is a replica."""
    return any(module in replica_of_part for module in model.modules())


def stream_states(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The seed and the step of the random streams of each replica in `model`, by its name there,
    and how many batches were requested from loaders."""
    found = ((name, _replica_of.get(module)) for name, module in model.named_modules())
    requests = progress.current.loader_requests
    return {name: (each.seed, each.steps, *requests) for name, each in found if each is not None}


def load_stream_states(model: nn.Module, states: dict[str, tuple[int, ...]]) -> None:
    """Let the streams go on where they were; those of other replicas stay as they are."""
    for name, module in model.named_modules():
        replica = _replica_of.get(module)
        if replica is not None and name in states:
            replica.seed, replica.steps, *requests = states[name]
            progress.current.set_loader_requests(*requests)


def with_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors, and the float32 copies of those that have one."""
    listed = list(tensors)
    copies = (copy() for each in listed if (copy := copy_of.get(each)) is not None)
    return [*listed, *(copy for copy in copies if copy is not None)]


def _add_new_parts(model: nn.Module, replica: Replica) -> None:
    """Replicate what is new in `model`: all of it, or what was added later. Collective."""
    tensors = {
        name: tensor
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
        if tensor not in statistics_of
    }
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise TrainingError(
                f"{name} has no shape yet; call the model once before instep.replicate."
            )
        check_reachable(tensor)
    check_same_on_all_ranks(
        [
            ("the argument compression", replica.compression),
            *((name, f"{tuple(t.shape)} {t.dtype}") for name, t in tensors.items()),
        ],
        "Build the same model on every rank.",
    )
    replica_of_part.update(dict.fromkeys(model.modules(), replica))
    batch_statistics.patch_tracked_instance_norm(model)
    broadcast_coalesced(with_copies(tensors.values()))
    for tensor in tensors.values():
        statistics_of[tensor] = replica.statistics
    parameters = [t for t in tensors.values() if isinstance(t, nn.Parameter)]
    if replica.transport.size > 1 and parameters:
        if replica.drift_check is None:
            buffers: Buffers = "warn" if replica.statistics == "global" else "rank"
            replica.drift_check = drift_check_of(model, replica.transport, buffers, is_replica=True)
        Reducer(
            parameters,
            replica.transport,
            replica.compression,
            replica.drift_check,
            tables=find_tables(model),
        )
    replica.has_new_parts = False


def _warn_of_draws(
    model: nn.Module, call: ForwardCall, seed: int, others: RNGStates | None
) -> None:
    """Warn if a call has drawn from generators otherwise than for the whole batch."""
    expected = torch.Generator().manual_seed(seed)
    for _ in range(call.draws):
        draw_token(expected)
    of_cpu, *of_gpu = default_generators()
    if (
        not torch.equal(expected.get_state(), of_cpu.get_state())
        or any(not torch.equal(make_rng_state(each, seed), each.get_state()) for each in of_gpu)
        or not (others is None or call.batch_dims.draws_same(call, others))
    ):
        place = find_first_own_draw(call, seed, others or RNGStates.capture())
        warn_at_script_line(
            f"{type(model).__name__} draws random numbers of its own in its forward"
            f"{place and f' ({place})'}; each rank draws its own, so the numbers are not those of "
            "one process. Draw them outside, for the whole batch, and shard them: "
            "instep.shard(noise). [INS701]",
        )


def _look_at_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn once of a class whose copy trains on this rank's share of a batch, or has its
    statistics."""
    if type(module) in _copies or module in replica_of_part:
        return
    if not may_be_share((args, kwargs)):
        return
    is_trained = module.training and torch.is_grad_enabled()
    if is_trained and any(p.requires_grad for p in module.parameters()):
        of_rank = "gradients"
    elif any(map(_uses_statistics_of_batch, module.modules())):
        of_rank = "batch statistics"
    elif any(isinstance(part, Dropout) and part.p for part in module.modules()):
        of_rank = "dropout masks"
    else:
        return
    _copies.add(type(module))
    purpose = " for training" if module.training else ""
    warn_at_script_line(
        f"a copy of a replicated {type(module).__name__} is called{purpose} with this rank's share "
        f"of a batch. It is no replica: its {of_rank} stay this rank's own. Call "
        "instep.replicate(copy). [INS708]",
    )


def _uses_statistics_of_batch(part: nn.Module) -> bool:
    """Whether it norms by them: in evaluation, too, where it has no running ones."""
    is_norm = isinstance(part, BatchNorm)
    return is_norm and (part.training or part.running_mean is None or part.running_var is None)


# Hooks are functions of this module that look up the replica: a deep copy or an unpickled model
# has these hooks and is not a replica.


@disable_compile
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    replica = _replica_of.get(module)
    if replica is None:
        _look_at_copy(module, args, kwargs)
        return
    if module.training and is_capturing_graph():
        raise CapturedStepError(
            f"a CUDA graph captures the forward of the replicated {type(module).__name__} in "
            "training. Which units it drops and what its batch weighs is decided anew in each "
            "step, and a replay does not. Leave the capture out."
        )
    if replica.has_new_parts:
        _add_new_parts(module, replica)
    again = forward_calls.find_recomputed(replica, (args, kwargs))
    seed = _next_seed(replica, module) if again is None else again.seed
    batch = find_candidates((args, kwargs), may_be_kept=torch.is_grad_enabled())
    call = ForwardCall(batch, replica.statistics, replica.dropout, seed, replica=replica)
    call.arguments, call.batch_dims = (module, args, kwargs), replica.batch_dims
    call.caller, call.needs_gradients = script_place(), torch.is_grad_enabled()
    if module.training:
        if not replica.has_warned:
            replica.other_states = RNGStates.capture()
        for generator in default_generators():
            call.saved_rng_states.append(generator.get_state())
            generator.manual_seed(derive_seed(seed, replica.transport.rank))
    forward_calls.push(call)
    set_phase("forward" if torch.is_grad_enabled() else "evaluation")


def _next_seed(replica: Replica, module: nn.Module) -> int:
    """The seed of a call. Only calls that all ranks make are steps of the replica: without
    gradients, or in a scope, a rank may not make this one."""
    is_step = torch.is_grad_enabled() and scope_number() is None
    replica.steps += module.training and is_step
    position = () if is_step or not module.training else progress.current.next_draw_position()
    return derive_seed(replica.seed, replica.steps, *position)


@disable_compile
def _leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
    replica = _replica_of.get(module)
    call = forward_calls.current()
    # If a hook that ran before has raised, `_enter` has not run, or has not ended.
    if replica is None or call is None or not call.arguments or call.replica is not replica:
        return
    call.needs_gradients = call.needs_gradients and _needs_gradients(module, output)
    forward_calls.pop()
    set_phase("")
    if call.saved_rng_states:
        if replica.dropout == "global" and not replica.has_warned:
            replica.has_warned = True
            seed = derive_seed(call.seed, replica.transport.rank)
            _warn_of_draws(module, call, seed, replica.other_states)
            replica.other_states = None
        for generator, state in zip(default_generators(), call.saved_rng_states, strict=False):
            generator.set_state(state)  # CUDA may have started meanwhile
    call.arguments = None
    forward_calls.tag_outputs(output, call)


def _needs_gradients(module: nn.Module, output: object) -> bool:
    """Whether a backward may reach this output, or what hooks have kept of the call."""
    return any(each.requires_grad for each in chain(tensor_leaves(output), module.parameters()))


def _on_registration(module: nn.Module, name: str, added: object) -> None:
    owner = replica_of_part.get(module)
    if owner is not None and added is not None:
        owner.has_new_parts = True


@functools.cache
def _patch_torch() -> None:
    """Replace the functions of torch that replicas need; once, for good."""
    register_module_parameter_registration_hook(_on_registration)
    register_module_module_registration_hook(_on_registration)
    follow_steps()
    PatchHandle(
        [
            gradients.PATCH,
            *batch_statistics.PATCHES,
            *dropout_masks.PATCHES,
            *functions.PATCHES,
            *linear_layers.PATCHES,
        ]
    )
