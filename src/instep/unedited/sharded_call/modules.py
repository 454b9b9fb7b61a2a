"""Calls of modules: the outermost one is divided among the ranks, where that is proven the same."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.transport import Transport, transport
from instep.process.patching import Function
from instep.training.pytree import is_column, is_value
from instep.unedited.sharded_call.compiled import compiling
from instep.unedited.sharded_call.division import has_text, rows_first
from instep.unedited.sharded_call.equivalence import prove, recheck
from instep.unedited.sharded_call.hooks import hooked
from instep.unedited.sharded_call.plan import Call, Plan, divided
from instep.unedited.sharded_call.work_begun import begun

PROOFS = 4
"""Other shapes are proven anew this many times; after that they count among the samples."""
RARELY = 8
"""Other numbers among the arguments are proven anew where they stay for this many calls, as an
epoch does; a step counter's only ever more seldom."""
TEXTS, KINDS = 16, 64
"""So many strings for the whole batch, and kinds of calls in all, are remembered of a module; calls
of others are computed whole."""
SAMPLES = frozenset(10**k for k in range(1, 20))
"""Which of a module's calls are compared with the whole forward."""

FEW_ROWS = "where a batch has fewer rows than there are ranks; other batches are not affected"
EVER_NEW_TEXTS = (
    f"more than {TEXTS} different strings came with its batches, and each may change what it does "
    "(a list with one string per row is divided with the rows)"
)
EVER_NEW_KINDS = f"it was called with more than {KINDS} kinds of arguments"


@dataclass(eq=False)
class Known:
    """What is known of a module's calls in one mode: arguments of one structure, training or not,
    with gradients or without."""

    mode: tuple[Any, ...]
    plan: Plan | None = None
    why_not: str = ""
    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    numbers: tuple[Any, ...] = ()
    """Those among the arguments of the last call."""
    changes: int = 0
    """How often these were others than in the call before."""
    calls: int = 0
    compared: int = 1
    """Which call was last compared with the whole forward."""

    def is_new(self, call: Call) -> bool:
        """Whether a call of these shapes and numbers is to be proven as the first one was."""
        new_numbers, new_shapes = self._is_new_in_numbers(call), self._is_new_in_shapes(call)
        return new_numbers or new_shapes

    def _is_new_in_shapes(self, call: Call) -> bool:
        shapes = tuple(tuple(x.shape) for x in call.leaves if isinstance(x, Tensor))
        if shapes in self.shapes or len(self.shapes) >= PROOFS:
            return False
        self.shapes.add(shapes)
        return True

    def _is_new_in_numbers(self, call: Call) -> bool:
        numbers = tuple(leaf for leaf in call.leaves if _is_number(leaf, rows_first(call.leaves)))
        if repr(numbers) == repr(self.numbers):
            return False
        self.numbers = numbers
        self.changes += 1
        stays = self.changes * RARELY <= self.calls
        return self.changes <= PROOFS or stays or self.changes.bit_count() == 1

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
        or is_rank_local()  # a sample that only this rank loads, or a loader's worker
    ):
        return original(module, *args, **kwargs)
    this = Call.of(original, module, args, kwargs)
    if not any(isinstance(leaf, Tensor) for leaf in this.leaves):
        return original(module, *args, **kwargs)
    _inside = True
    try:
        with compiling(module.modules()):
            return _outermost(this, transport())
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
    new = known.is_new(call)
    if known.plan is None:
        known.plan, output, known.why_not = prove(call, way)
        if known.why_not and rows_first(call.leaves) < way.size:
            known.why_not = FEW_ROWS
    elif new or known.is_sampled():
        output, known.why_not = recheck(call, known.plan, way, gradients=new)
        if known.why_not:
            known.why_not += f" (calls {known.compared + 1} to {known.calls - 1} were divided)"
        known.compared = known.calls
    else:
        known.plan, output = divided(call, known.plan, way)
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
        begun()
        block = plan.division.block(call.leaves, way.rank, way.size)
        assert block is not None
        rows = block.count
    if torch.is_grad_enabled() and not _above:
        work.samples += rows


def _rows(call: Call, plan: Plan | None) -> int:
    """How many rows this batch has; 0 where it cannot be said."""
    if plan is not None:
        block = plan.division.block(call.leaves, 0, 1)
        return 0 if block is None else block.total
    sizes = [max(x.shape[:2]) for x in call.leaves if isinstance(x, Tensor) and x.dim()]
    return max(sizes, default=0)


def _what_is_known(call: Call, size: int) -> Known:
    rows = rows_first(call.leaves)
    kind = (
        rows < size,  # what cannot be done with one row may be with many
        call.module.training,
        torch.is_grad_enabled(),
        call.structure,
        tuple(_kind(leaf, rows) for leaf in call.leaves),
    )
    texts = tuple(leaf for leaf in call.leaves if _is_text(leaf, rows))
    kinds = _known.setdefault(call.module, [])
    for known in kinds:
        if known.mode == (kind, texts):
            return known
    if len(kinds) >= KINDS:
        return _whole_from_now_on(call, EVER_NEW_KINDS)
    if texts and sum(known.mode[0] == kind for known in kinds) >= TEXTS:
        return _whole_from_now_on(call, EVER_NEW_TEXTS)
    kinds.append(Known((kind, texts)))
    return kinds[-1]


def _whole_from_now_on(call: Call, why: str) -> Known:
    _say(call.module, why)
    return Known((), why_not=why)


def _kind(leaf: Any, rows: int) -> Any:
    """What of an argument calls for a proof of its own; shapes, strings and numbers do by
    themselves."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.device
    if is_column(leaf):
        return type(leaf), has_text(leaf), None if len(leaf) == rows else len(leaf)
    if isinstance(leaf, str | int | float | complex) and not isinstance(leaf, bool):
        return type(leaf)
    return leaf if is_value(leaf) else type(leaf)


def _is_text(leaf: Any, rows: int) -> bool:
    """Whether this is a string, or strings, for the whole batch: where there is one per row, it is
    data, as the rows are."""
    return has_text(leaf) and not (is_column(leaf) and len(leaf) == rows)


def _is_number(leaf: Any, rows: int) -> bool:
    """Whether this is a number, or numbers, for the whole batch."""
    if is_column(leaf):
        return not has_text(leaf) and len(leaf) != rows
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


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
            joint = " " if why == FEW_ROWS else ": "
            print(f"instep: every rank computes {name} whole{joint}{why}.", file=sys.stderr)
