"""The recorder: records a rank while the user's script trains, and makes the plan's changes.

It looks through official hooks of torch (module calls, optimizer steps) and a patch at the root of
backward. It does not communicate; ranks are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from instep.distributed.identity.torch_devices import is_capturing_graph
from instep.process.patching import Function, Patch, PatchHandle
from instep.process.torch_private.autograd import current_graph_task_id
from instep.training.autograd_graph import roots_of
from instep.unedited import session
from instep.unedited.sharded_call.counting import call_counts
from instep.verify.recording import changes
from instep.verify.recording.fingerprints import fingerprint, hash_generators, to_dense_real
from instep.verify.recording.module_calls import ModuleCall, ModuleCallRecorder, find_module_calls
from instep.verify.recording.records import (
    Fingerprints,
    RankSummary,
    RecordWriter,
    RunPlan,
    StepRecord,
)
from instep.verify.recording.tensor_names import TensorNames


class Recorder:
    """Records one rank into a folder."""

    def __init__(self, plan: RunPlan, folder: Path, rank: int) -> None:
        self._plan, self._writer = plan, RecordWriter(folder, rank)
        self._names = TensorNames()
        self._calls = ModuleCallRecorder(self._names, self._on_new_parameters)
        self._loaders = changes.IndexRecorder(plan.reverse)
        self._step = 0
        self._depth = 0
        self._trained: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}
        self._losses: list[tuple[float, float | None]] = []
        self._used: set[ModuleCall] = set()
        self._step_record: StepRecord | None = None
        self._stopped = False

    def install(self) -> None:
        """Install all hooks and patches, before the script starts."""
        if self._plan.without_instep:
            changes.disable_instep()
        if not self._plan.autocast:
            changes.disable_autocast()
        if self._plan.without_instep or session.current() is not None:
            self._calls.install_outermost()
        else:
            self._calls.install()
        self._loaders.install()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        PatchHandle([Patch(torch.autograd, "backward", self._backward, compile="skip")])

    def finish(self) -> None:
        """Write the end of the record, after the script has ended."""
        if self._plan.final:
            kinds = {
                "parameters": self._trained,
                "buffers": self._names.buffers(),
                "initial": self._initial,
            }
            self._writer.tensors("final", {kind: _copy_tensors(ts) for kind, ts in kinds.items()})
        divided = call_counts.sharded if _records_whole_batches() else None
        end = RankSummary(
            whole=not self._stopped,
            indices=tuple(self._loaders.asked),
            divided=divided,
            replicated=self._names.replicated(),
            buffers=_fingerprint_all(self._names.buffers()),
            opt_out=session.opt_out_reason(),
        )
        self._writer.end(end)

    # ----------------------------------------------------------------- what torch calls

    def _backward(
        self, original: Function, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        nested = current_graph_task_id() != -1  # reentrant checkpointing
        roots = roots_of(tensors)
        if not nested and not is_capturing_graph():
            calls = find_module_calls(roots)
            shares = {call.share for call in calls}
            values = [root.detach() for root in roots if isinstance(root, Tensor)]
            if values:  # a GradientEdge has none
                loss = sum(value.double().sum().item() for value in values)
                self._losses.append((loss, shares.pop() if len(shares) == 1 else None))
            self._used |= calls
        original(tensors, grad_tensors, *args, **kwargs)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._depth += 1
        if self._depth > 1:  # an optimizer inside an optimizer
            return None
        if self._stopped:
            raise SystemExit
        if is_capturing_graph():  # the final parameters tell what its replays have done
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._record_step(optimizer)
            return None
        watched = self._wrap_closure(closure, optimizer)
        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, kwargs | {"closure": watched}

    def _wrap_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """A closure's first gradient is the one at the parameters before the step."""

        def watched() -> Any:
            loss = closure()
            if self._step_record is None:
                self._record_step(optimizer)
            return loss

        return watched

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._depth -= 1
        if self._depth or is_capturing_graph():
            return
        if self._step_record is None:
            self._record_step(optimizer)
        assert self._step_record is not None
        self._writer.step(self._step_record)
        self._apply_plan(optimizer)
        self._step += 1
        self._losses, self._used, self._step_record = [], set(), None
        if self._step == self._plan.stop:
            self._stopped = True
            raise SystemExit

    # ------------------------------------------------------------------ what it does then

    def _record_step(self, optimizer: Optimizer) -> None:
        parameters = dict(self._names.parameters(optimizer))
        self._trained |= parameters
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        used = sorted(self._used, key=lambda call: call.row_hashes)
        self._step_record = StepRecord(
            losses=tuple(self._losses),
            lrs=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            samples=sum(call.samples for call in used),
            computed=sum(call.computed for call in used),
            whole=_records_whole_batches(),
            row_hashes=tuple(row for call in used for row in call.row_hashes),
            uses_random=any(call.uses_random for call in used),
            half_precision=max((call.half_precision for call in used), default=""),
            generator_hash=hash_generators(),
            gradients=_fingerprint_all(gradients),
            parameters=_fingerprint_all(parameters),
            buffers=_fingerprint_all(self._names.buffers()),
        )
        if self._step in self._plan.keep:
            self._writer.tensors(f"gradients{self._step}", _copy_tensors(gradients))
        if self._plan.final:
            new = {name: p for name, p in parameters.items() if name not in self._initial}
            self._initial |= _copy_tensors(new)
        if self._plan.rounding and self._step == 0:  # those that no module brought too
            self._perturb(parameters.values(), self._plan.rounding)

    def _on_new_parameters(self, parameters: list[Tensor]) -> None:
        if self._plan.rounding and parameters:
            self._perturb(parameters, self._plan.rounding)

    def _apply_plan(self, optimizer: Optimizer) -> None:
        parameters = dict(self._names.parameters(optimizer))
        buffers = self._names.buffers()
        following = self._step + 1
        if self._plan.states and following in self._plan.keep:
            state = changes.copy_state(optimizer, parameters, buffers)
            self._writer.tensors(f"state{following}", state)
        if self._plan.pin is not None:
            changes.load_state(Path(self._plan.pin), following, optimizer, parameters, buffers)
            if self._plan.rounding and following in self._plan.keep:
                self._perturb(parameters.values(), self._plan.rounding + following)

    def _perturb(self, parameters: Iterable[Tensor], seed: int) -> None:
        changes.perturb(parameters, seed, self._plan.half_precision)


def _records_whole_batches() -> bool:
    """Whether the script runs unedited on several ranks: what is recorded is equal on all."""
    unedited = session.current()
    return unedited is not None and unedited.world.size > 1


def _fingerprint_all(tensors: dict[str, Tensor]) -> Fingerprints:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def _copy_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: to_dense_real(tensor).cpu().clone() for name, tensor in tensors.items()}
