"""The recorder: sits in a rank while the user's script trains, and changes what its plan says.

It looks through official hooks of torch (module calls, optimizer steps) and a patch at the root of
backward. It communicates with nobody: ranks are compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from instep.process.patching import Function, Patch, PatchHandle
from instep.unedited import session
from instep.unedited.sharded_call.modules import work
from instep.verify.recording import changes
from instep.verify.recording.fingerprints import fingerprint, generators_digest, plain
from instep.verify.recording.module_calls import Call, Calls, calls_below
from instep.verify.recording.names import Names
from instep.verify.recording.records import End, Plan, Prints, Step, Writer


class Recorder:
    """Records one rank into a folder."""

    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self._plan, self._writer = plan, Writer(folder, rank)
        self._names = Names()
        self._calls = Calls(self._names, self._met)
        self._loaders = changes.Loaders(plan.reverse)
        self._step = 0
        self._depth = 0
        self._optimizers: list[Optimizer] = []
        self._trained: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}
        self._losses: list[tuple[float, float | None]] = []
        self._used: set[Call] = set()
        self._seen: Step | None = None
        self._stopped = False

    def install(self) -> None:
        """Take the places from where one sees training. Before the script begins."""
        if self._plan.without_instep:
            changes.leave_out_instep()
        if self._plan.without_instep or session.current() is not None:
            self._calls.watch_from_outside()
        else:
            self._calls.watch()
        self._loaders.watch()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        PatchHandle([Patch(torch.autograd, "backward", self._backward, compile="skip")])

    def finish(self) -> None:
        """The script has ended: write what is left."""
        if self._plan.final:
            kinds = {
                "parameters": self._trained,
                "buffers": self._names.buffers(),
                "initial": self._initial,
            }
            self._writer.tensors("final", {kind: _copies(ts) for kind, ts in kinds.items()})
        divided = work.divided if _sees_whole_batches() else None
        self._writer.end(End(not self._stopped, tuple(self._loaders.asked), divided))

    # ----------------------------------------------------------------- what torch calls

    def _backward(
        self, original: Function, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        nested = torch._C._current_graph_task_id() != -1  # reentrant checkpointing
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not nested:
            calls = calls_below(roots)
            shares = {call.share for call in calls}
            loss = sum(root.detach().double().sum().item() for root in roots)
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
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._look(optimizer)
            return None
        watched = self._looking_after(closure, optimizer)
        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, kwargs | {"closure": watched}

    def _looking_after(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """A closure's first gradient is the one at the parameters before the step."""

        def watched() -> Any:
            loss = closure()
            if self._seen is None:
                self._look(optimizer)
            return loss

        return watched

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._seen is None:
            self._look(optimizer)
        assert self._seen is not None
        self._writer.step(self._seen)
        self._change(optimizer)
        self._step += 1
        self._losses, self._used, self._seen = [], set(), None
        if self._step == self._plan.stop:
            self._stopped = True
            raise SystemExit

    # ------------------------------------------------------------------ what it does then

    def _look(self, optimizer: Optimizer) -> None:
        parameters = self._parameters(optimizer)
        self._trained |= parameters
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        used = sorted(self._used, key=lambda call: call.rows)
        self._seen = Step(
            losses=tuple(self._losses),
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            samples=sum(call.samples for call in used),
            computed=sum(call.computed for call in used),
            whole=_sees_whole_batches(),
            rows=tuple(row for call in used for row in call.rows),
            drew=any(call.drew for call in used),
            half=any(call.half for call in used),
            random=generators_digest(),
            gradients=_prints(gradients),
            parameters=_prints(parameters),
            buffers=_prints(self._names.buffers()),
        )
        if self._step in self._plan.keep:
            self._writer.tensors(f"gradients{self._step}", _copies(gradients))
        if self._plan.final:
            new = {name: p for name, p in parameters.items() if name not in self._initial}
            self._initial |= _copies(new)
        if self._plan.rounding and self._step == 0:  # those that no module brought too
            changes.perturb(parameters.values(), self._plan.rounding)

    def _met(self, parameters: list[Tensor]) -> None:
        if self._plan.rounding and parameters:
            changes.perturb(parameters, self._plan.rounding)

    def _change(self, optimizer: Optimizer) -> None:
        parameters, buffers = self._parameters(optimizer), self._names.buffers()
        following = self._step + 1
        if self._plan.states and following in self._plan.keep:
            state = changes.state_of(optimizer, parameters, buffers)
            self._writer.tensors(f"state{following}", state)
        if self._plan.pin is not None:
            changes.put_in_place(Path(self._plan.pin), following, optimizer, parameters, buffers)
            if self._plan.rounding and following in self._plan.keep:
                changes.perturb(parameters.values(), self._plan.rounding + following)

    def _parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        which = next(k for k, known in enumerate(self._optimizers) if known is optimizer)
        return dict(self._names.parameters(optimizer, which))


def _sees_whole_batches() -> bool:
    """Whether the script runs unedited on several ranks: what is recorded is equal on all."""
    unedited = session.current()
    return unedited is not None and unedited.world.size > 1


def _prints(tensors: dict[str, Tensor]) -> Prints:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: plain(tensor).cpu().clone() for name, tensor in tensors.items()}
