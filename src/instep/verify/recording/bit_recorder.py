"""Records digests of all that a rank computes with `--bitwise`, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from instep.distributed.communication.tensors import as_bytes
from instep.process import in_main_thread
from instep.process.patching import Function, Patch, PatchHandle
from instep.process.torch_private.autograd import current_graph_task_id
from instep.training.autograd_graph import roots_of
from instep.training.pytree import find_tensors
from instep.unedited.sharded_call.run.region import current_region
from instep.verify.recording.fingerprints import hash_generators, to_dense_real
from instep.verify.recording.records import RankSummary, RecordWriter, RunPlan
from instep.verify.recording.tensor_names import TensorNames

Digests = list[tuple[str, str]]
"""What was computed, in order, and the digest of its bytes."""


@dataclass(frozen=True)
class StepBits:
    """One optimizer step on one rank."""

    of_shards: dict[int, Digests]
    """What the modules returned for each shard of the batch that this rank has computed."""
    of_all: Digests
    """What is the same on all ranks: outputs, losses, gradients, parameters, states."""
    state: str
    """A digest of all parameters, buffers and optimizer states after the step."""


class BitRecorder:
    """Records one rank into a folder."""

    def __init__(self, plan: RunPlan, folder: Path, rank: int) -> None:
        self._stop, self._writer = plan.stop, RecordWriter(folder, rank)
        self._names = TensorNames()
        self._module_names: dict[int, str] = {}
        self._depth = self._steps = 0
        self._of_shards: dict[int, Digests] = defaultdict(list)
        self._of_all: Digests = []

    def install(self) -> None:
        """Install all hooks and patches, before the script starts."""
        PatchHandle(
            [
                Patch(nn.Module, "__call__", self._call),
                Patch(torch.autograd, "backward", self._backward, compile="skip"),
            ]
        )
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def finish(self) -> None:
        """Write the end of the record, after the script has ended."""
        self._writer.end(RankSummary())

    # ----------------------------------------------------------------- what torch calls

    def _call(self, original: Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return original(module, *args, **kwargs)
        region = current_region()
        is_main = in_main_thread()
        if region is None and not is_main:
            return original(module, *args, **kwargs)
        if region is None and self._depth == 0:
            self._names.register(module)
            kind = type(module).__name__
            self._module_names = {
                id(part): f"{kind}.{name}" if name else kind
                for name, part in module.named_modules()
            }
        self._depth += is_main
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._depth -= is_main
        where = self._of_all if region is None else self._of_shards[region.shard]
        name = self._module_names.get(id(module), type(module).__name__)
        where.append((f"the output of {name}", digest(find_tensors(output))))
        return output

    def _backward(self, original: Function, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if current_graph_task_id() == -1:  # not nested
            losses = [root for root in roots_of(tensors) if isinstance(root, Tensor)]
            self._of_all.append(("the loss", digest(losses)))
        original(tensors, *args, **kwargs)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._steps == self._stop:
            raise SystemExit
        for name, parameter in self._names.parameters(optimizer):
            if parameter.grad is not None:
                self._of_all.append((f"the gradient of {name}", digest([parameter.grad])))

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        names = self._names
        trained = [(each, *pair) for each in names.optimizers for pair in names.parameters(each)]
        new = [
            *((f"the parameter {name}", [p]) for _, name, p in trained),
            *((f"the buffer {name}", [b]) for name, b in names.buffers().items()),
            *(
                (f"the optimizer's {key} of {name}", find_tensors(value))
                for each, name, p in trained
                for key, value in each.state.get(p, {}).items()
            ),
        ]
        digests = [(what, digest(tensors)) for what, tensors in new]
        random = [("the state of the random generators", hash_generators())]
        state = sha256("".join(each for _, each in digests).encode()).hexdigest()
        step = StepBits(dict(self._of_shards), [*self._of_all, *digests, *random], state)
        self._writer.step(step)
        self._of_shards.clear()
        self._of_all.clear()
        self._steps += 1
        if self._steps == self._stop:
            raise SystemExit


def digest(tensors: Iterable[Tensor]) -> str:
    """A digest of the bytes of these tensors."""
    hashed = sha256()
    for tensor in tensors:
        hashed.update(as_bytes(to_dense_real(tensor).cpu()).numpy().tobytes())
    return hashed.hexdigest()
