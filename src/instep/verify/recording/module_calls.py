"""The module calls from which a loss was computed, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import get_transport
from instep.distributed.identity.torch_devices import is_capturing_graph
from instep.process.patching import Function, Patch, PatchHandle
from instep.training import forward_calls
from instep.training.autograd_graph import Root, next_nodes, tag, walk
from instep.training.batches.registry import find_block
from instep.training.blocks import Block
from instep.training.pytree import find_tensors
from instep.training.random_streams import default_generators, derive_seed, make_rng_state
from instep.unedited.sharded_call.counting import call_counts
from instep.verify.recording.fingerprints import hash_generators, hash_rows
from instep.verify.recording.tensor_names import TensorNames

_MARK = "instep.verify.call"


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of an outermost module with parameters, under gradients."""

    samples: int
    row_hashes: tuple[int, ...]
    computed: int
    """The number of samples that this rank's modules computed."""
    block: Block | None
    uses_random: bool
    half_precision: str
    """As in StepRecord."""
    replica: forward_calls.ForwardCall | None
    """instep's own record of it, if it is the call of a replicated model."""

    @property
    def share(self) -> float | None:
        """This rank's weight in the loss: as stated, else by rows; None if unknown."""
        if self.replica is not None and self.replica.weight is not None:
            return self.replica.weight
        if self.block is None:
            return None
        return self.block.count / self.block.total if self.block.total else 0.0


class ModuleCallRecorder:
    """Records module calls, through torch's global hooks or by a patch outside of all others."""

    def __init__(
        self, names: TensorNames, on_new_parameters: Callable[[list[Tensor]], None]
    ) -> None:
        self._names = names
        self._on_new_parameters = on_new_parameters
        """Called with parameters before they are first used."""
        self._depth = 0
        self._before = ""
        self._work = replace(call_counts)

    def install(self) -> None:
        """Install torch's hooks in this process. They see this rank's rows of a replica."""
        torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        torch.nn.modules.module.register_module_forward_hook(
            self._leave, with_kwargs=True, always_call=True
        )

    def install_outermost(self) -> None:
        """From now on, in this process. Sees what the script sees: a sharded call is whole."""
        PatchHandle([Patch(nn.Module, "__call__", self._outside)])

    def _outside(self, original: Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_capturing_graph():
            return original(module, *args, **kwargs)
        output = None
        self._enter(module, args)
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._leave(module, args, kwargs, output)
        return output

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and not is_capturing_graph():
            self._on_new_parameters(self._names.register(module))
            self._before = hash_generators()
            self._work = replace(call_counts)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        self._depth -= 1
        output = rest[-1]
        outputs = [t for t in find_tensors(output) if t.grad_fn is not None]
        if self._depth or not outputs or next(iter(module.parameters()), None) is None:
            return
        if is_capturing_graph():
            return  # the values are not there yet
        kwargs = rest[0] if len(rest) == 2 else {}
        inputs, half = find_tensors((args, kwargs)), _half_precision_of(output)
        call = _call(inputs, self._used_random(), half, self._computed_rows())
        tag(outputs, _MARK, call)

    def _computed_rows(self) -> int | None:
        """The number of rows that this rank computed in the call that ends now; None: all."""
        before = self._work
        if call_counts.sharded == before.sharded or call_counts.whole > before.whole:
            return None
        return call_counts.samples - before.samples

    def _used_random(self) -> bool:
        """Whether the call that ends now has drawn random numbers.

        A replica in training begins with its generators in a state of its own.
        """
        replica = forward_calls.current()
        if replica is None or not replica.saved_rng_states:
            return hash_generators() != self._before
        seed = derive_seed(replica.seed, get_transport().rank)
        moved = any(
            not torch.equal(make_rng_state(each, seed), each.get_state())
            for each in default_generators()
        )
        others_moved = hash_generators(replica.saved_rng_states) != self._before
        return replica.draws > 0 or moved or others_moved


def _half_precision_of(output: object) -> str:
    for tensor in find_tensors(output):
        device = tensor.device.type
        on = torch.is_autocast_enabled(device)
        for dtype in (tensor.dtype, *([torch.get_autocast_dtype(device)] if on else [])):
            if dtype in (torch.float16, torch.bfloat16):
                return str(dtype).removeprefix("torch.")
    return ""


def _call(inputs: list[Tensor], drew: bool, half: str, own: int | None) -> ModuleCall:
    replica = forward_calls.current()
    blocks = map(find_block, inputs) if replica is None else [replica.block]
    block = next((each for each in blocks if each is not None), None)
    batch = next((tensor for tensor in inputs if tensor.dim()), None)
    if batch is None or (block is not None and block.count == 0):
        return ModuleCall(0, (), own or 0, block, drew, half, replica)
    dimension = _sample_dimension(batch, inputs, block)
    rows, samples = hash_rows(batch.movedim(dimension, 0)), batch.shape[dimension]
    return ModuleCall(samples, rows, samples if own is None else own, block, drew, half, replica)


def _sample_dimension(batch: Tensor, inputs: list[Tensor], block: Block | None) -> int:
    """The dimension of the samples: 0, or 1 if only that fits (sequence first)."""
    if block is None:
        alike = [len({x.shape[d] for x in inputs if x.dim() > 1}) == 1 for d in (0, 1)]
    else:
        alike = [size in (block.count, block.total) for size in batch.shape[:2]]
    return 1 if batch.dim() > 1 and alike == [False, True] else 0


def find_module_calls(roots: Iterable[Root]) -> set[ModuleCall]:
    """The calls from whose outputs these tensors were computed, without calls below those."""
    found = set()

    def visit(node: Any) -> Iterable[Any]:
        call = node.metadata.get(_MARK)
        if call is None:
            return next_nodes(node)
        found.add(call)
        return ()

    walk(roots, visit)
    return found
