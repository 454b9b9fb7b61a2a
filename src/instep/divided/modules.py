"""Calls of modules: the outermost one is divided among the ranks, where that is proven the same."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from instep.communication.apart import is_apart
from instep.communication.transport import Transport, transport
from instep.divided.compiled import compiling
from instep.divided.hooks import hooked
from instep.divided.plan import Call, Plan, divided
from instep.divided.proof import prove, recheck
from instep.training.seams import Function

PROOFS = 4
"""Other shapes are proven anew this many times; after that they count among the samples."""
SAMPLES = frozenset(10**k for k in range(1, 20))
"""Which of a module's calls are compared with the whole forward."""

FEW_ROWS = "some of its batches have fewer rows than there are ranks"


@dataclass(eq=False)
class Known:
    """What is known of a module's calls in one mode: arguments of one structure, training or not,
    with gradients or without."""

    mode: tuple[Any, ...]
    plan: Plan | None = None
    why_not: str = ""
    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    calls: int = 0
    compared: int = 1
    """Which call was last compared with the whole forward."""

    def is_new(self, shapes: tuple[Any, ...]) -> bool:
        """Whether a call of these shapes is to be proven as the first one was."""
        return shapes not in self.shapes and len(self.shapes) < PROOFS

    def is_sampled(self) -> bool:
        """Whether this call's outputs are to be compared with those of the whole forward.

        The second to fourth are, too, where a mean over rows could be one over something else.
        """
        has_sums = self.plan is not None and self.plan.has_sums
        return self.calls in SAMPLES or (has_sums and self.calls <= 4)


@dataclass
class Work:
    """What this rank did so far."""

    divided: int = 0
    """Calls of which it computed its own rows."""
    whole: int = 0
    """Calls that every rank computed whole."""
    samples: int = 0
    """Rows that went through this rank's modules with gradients enabled."""


work = Work()
_known: WeakKeyDictionary[nn.Module, list[Known]] = WeakKeyDictionary()
_said: set[tuple[str, str]] = set()
_inside = False
"""Whether a call is under way whose parts are not looked at."""
_above = 0
"""How many calls are under way that cannot be divided, whose parts may."""


def call(original: Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """nn.Module.__call__: divided if it is an outermost one of a module with parameters.

    Where that cannot be, the parts that it is made of are, unless they are single layers.
    """
    global _inside
    if (
        torch.compiler.is_compiling()
        or _inside
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None  # torch.func's transforms
        or next(module.parameters(), None) is None
        or (_above and not module._modules)
        or threading.current_thread() is not threading.main_thread()
        or is_apart()  # a sample that only this rank loads, or a loader's worker
    ):
        return original(module, *args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return original(module, *args, **kwargs)
    _inside = True
    try:
        with compiling(module.modules()):
            return _outermost(Call(original, module, leaves, spec), transport())
    finally:
        _inside = False


def _outermost(call: Call, way: Transport) -> Any:
    known = _what_is_known(call, way.size)
    known.calls += 1
    if known.why_not:
        _count(call, None, way)
        return _by_its_parts(call)
    if why := hooked(call.module):
        _say(call.module, why)
        _count(call, None, way)
        return _by_its_parts(call)
    if _rows(call, known.plan) < way.size:
        _say(call.module, FEW_ROWS)
        _count(call, None, way)
        return call.whole()
    shapes = tuple(tuple(x.shape) for x in call.leaves if isinstance(x, Tensor))
    if known.plan is None:
        known.plan, output, known.why_not = prove(call, way)
        if known.why_not and _rows_first(call) < way.size:
            known.why_not = FEW_ROWS
    elif (new := known.is_new(shapes)) or known.is_sampled():
        output, known.why_not = recheck(call, known.plan, way, gradients=new)
        if known.why_not:
            known.why_not += f" (calls {known.compared + 1} to {known.calls - 1} were divided)"
        known.compared = known.calls
    else:
        known.plan, output = divided(call, known.plan, way)
    known.shapes.add(shapes)
    if known.why_not:
        known.plan = None
        _say(call.module, known.why_not)
    _count(call, known.plan, way)
    return output


def _by_its_parts(call: Call) -> Any:
    global _inside, _above
    _inside, _above = False, _above + 1
    try:
        return call.whole()
    finally:
        _inside, _above = True, _above - 1


def _count(call: Call, plan: Plan | None, way: Transport) -> None:
    if plan is None:
        work.whole += 1
        rows = _rows(call, None)
    else:
        work.divided += 1
        block = plan.division.block(call.leaves, way.rank, way.size)
        rows = block.count if block is not None else 0
    if torch.is_grad_enabled() and not _above:
        work.samples += rows


def _rows(call: Call, plan: Plan | None) -> int:
    """How many rows this batch has; 0 where it cannot be said."""
    if plan is not None:
        block = plan.division.block(call.leaves, 0, 1)
        return 0 if block is None else block.total
    sizes = [max(x.shape[:2]) for x in call.leaves if isinstance(x, Tensor) and x.dim()]
    return max(sizes, default=0)


def _rows_first(call: Call) -> int:
    """How many rows there are, if the batch is dimension 0."""
    return max((x.shape[0] for x in call.leaves if isinstance(x, Tensor) and x.dim()), default=0)


def _what_is_known(call: Call, size: int) -> Known:
    mode = (
        _rows_first(call) < size,  # what cannot be done with one row may be with many
        call.module.training,
        torch.is_grad_enabled(),
        call.spec,
        tuple(_kind(leaf) for leaf in call.leaves),
    )
    modes = _known.setdefault(call.module, [])
    for known in modes:
        if known.mode == mode:
            return known
    modes.append(Known(mode))
    return modes[-1]


def _kind(leaf: Any) -> Any:
    """What of an argument calls for a proof of its own; shapes do by themselves."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.device
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def forget() -> None:
    """Prove everything anew, and count from zero."""
    _known.clear()
    _said.clear()
    work.__init__()  # type: ignore[misc]


def _say(module: nn.Module, why: str) -> None:
    """One line, once, on rank 0: what is not divided, and why. That the batch is too small is not
    said of each part of what is computed whole anyway."""
    line = (type(module).__name__, why)
    if line not in _said and not (_above and why == FEW_ROWS):
        _said.add(line)
        if transport().rank == 0:
            name, why = line
            print(f"instep: every rank computes {name} whole: {why}.", file=sys.stderr)
