"""Which dimension of what a forward draws has the rows of the batch.

A shape does not tell: of 32 rows, a draw of shape (32,) may be one number for each row, or one for
each feature. So the forward is tried once with every row twice, on a copy of the module that shares
its parameters, and the shapes that each line of the script draws are compared.
"""

from __future__ import annotations

import copy
import io
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from instep.distributed.flight_record.script_line import (
    location,
    script_frame,
    warn_at_script_line,
)
from instep.distributed.identity import torch_devices
from instep.distributed.watchdog.call_stack import script_line
from instep.process.torch_private.tensors import tree_leaves, tree_map_only
from instep.training import forward_calls
from instep.training.batches.candidates import BatchCandidates
from instep.training.blocks import Block
from instep.training.forward_calls import ForwardCall
from instep.training.random_streams import RNGStates, restoring_default_generators

Shape = tuple[int, ...]
Dim = int | None | Literal["unknown", "by data"]
"""The dimension of the rows; None: there is none, the numbers are for the whole batch; "by data":
in some dimension there are not equally many entries for each row; "unknown": no trial has told."""

_OF_TORCH = ""
"""The line of what modules of torch draw, where none of the script's is between."""

_MAX_TRIALS = 8
"""A model whose shapes go on changing is not tried for ever."""


class BatchDims:
    """What is known of the draws of one replica.

    Args:
        in_step: whether numpy's generator was in the state of rank 0's, and Python's.
    """

    def __init__(self, in_step: list[bool]) -> None:
        self._in_step = in_step
        self._known: dict[tuple[str, Shape, int], Dim] = {}
        self._dims_at: defaultdict[tuple[str, int], set[Dim]] = defaultdict(set)
        self._shapes_without: set[tuple[str, Shape]] = set()
        self._drawn: dict[int, list[tuple[str, Shape]]] = {}
        """The lines and shapes of the trial in forwards with so many rows."""
        self._lines_by_data: set[str] = set()
        self._trials = 0
        self._warned: set[str] = set()

    def find(self, shape: Shape, rows: int, call: ForwardCall) -> Dim:
        """The dimension of the rows in a draw of this shape, in a call with so many rows."""
        line = self._line(shape, call)
        if call.trial is not None:
            return "unknown"
        dim = self._find(line, shape, rows, call)
        if dim == "unknown" and not _may_have_rows(shape, rows) and not self._differs(line, shape):
            return None
        if dim == "by data":
            self.warn(
                f"draws {shape} in a forward with {rows} rows on this rank: how many these are "
                "depends on more than the number of rows. Each rank draws its own, so the numbers "
                "are not those of one process. Draw for all rows and select then: "
                "torch.randn_like(h)[mask] in place of torch.randn_like(h[mask])."
            )
        return dim

    def find_in_mask(self, shape: Shape, block: Block, call: ForwardCall) -> Dim:
        """The dimension of the rows in a mask of dropout: "by data" if how many entries it has in
        this dimension depends on the rows, and not on their number alone."""
        line, rows = self._line(shape, call), max(block.count, 1)
        if call.trial is not None:
            return "unknown"
        seems_to_have_rows = shape[:1] == (rows,) and shape[1:2] != (rows,)
        if seems_to_have_rows and (block.size == 1 or line == _OF_TORCH):
            return 0  # what modules of torch drop has the rows of their input
        dim: Dim = None
        if block.size > 1 or _may_have_rows(shape, rows):
            dim = self._find(line, shape, rows, call)
        if dim == "unknown":
            guess = 1 if shape[1:2] == (rows,) and shape[:1] != (rows,) else 0
            dim = "by data" if not shape or shape[guess] % rows else guess
        if dim != "by data" or block.size == 1:
            return dim
        self.warn(
            f"drops units of {shape} in a forward with {rows} rows on this rank: how many these "
            "are depends on more than the number of rows, or instep cannot tell. Each rank draws "
            "its own mask, so the numbers are not those of one process. Drop before rows are "
            'selected, or choose that: instep.replicate(model, dropout="rank").'
        )
        return dim

    def _line(self, shape: Shape, call: ForwardCall) -> str:
        line = script_place()
        line = _OF_TORCH if line == call.caller else line
        if call.trial is not None:
            call.trial.append((line, shape))
        return line

    def _find(self, line: str, shape: Shape, rows: int, call: ForwardCall) -> Dim:
        if 0 in shape:
            return None
        key = line, shape, rows
        if key not in self._known:
            dim = self._infer(line, shape, rows)
            if dim == "unknown" and line in self._lines_by_data:
                dim = "by data"
            if dim == "unknown" and call.arguments is not None and self._trials < _MAX_TRIALS:
                self._trials += 1
                self._drawn[rows], _ = _try_every_row_twice(call, rows)
                dim = self._infer(line, shape, rows)
            self._learn(key, dim)
        return self._known[key]

    def _differs(self, line: str, shape: Shape) -> bool:
        """Whether this line has drawn other shapes in trials, and never this one."""
        others = {other for drawn in self._drawn.values() for at, other in drawn if at == line}
        return bool(others) and shape not in others

    def draws_same(self, call: ForwardCall, before: RNGStates) -> bool:
        """Whether what a call has drawn from numpy's and Python's generators since `before` is the
        same on all ranks: they were in step, and it draws as much from them for twice the rows."""
        now = RNGStates.capture()
        pairs = zip(self._in_step, before.sums(), now.sums(), strict=True)
        used = [is_in_step for is_in_step, first, last in pairs if first != last]
        block = call.batch.resolve_on_this_rank() if all(used) else None
        if not used or block is None:
            return not used
        _, after = _try_every_row_twice(call, max(block.count, 1), before)
        return after is not None and after.equals_except_torch(now)

    def warn(self, problem: str) -> None:
        """Warn of a line of the script, once."""
        line = script_line()
        if line not in self._warned:
            self._warned.add(line)
            warn_at_script_line(f"This line {problem} [INS701]")

    def _infer(self, line: str, shape: Shape, rows: int) -> Dim:
        """From a trial, or from draws of the same line with other numbers of rows."""
        dim = _doubled_dim(self._drawn_at(line, rows), shape, rows)
        if dim != "unknown":
            return dim
        if (line, shape) in self._shapes_without:
            return None
        dims = self._dims_at[line, len(shape)]
        dim = next(iter(dims)) if len(dims) == 1 else "unknown"
        if isinstance(dim, int) and shape[dim] % rows:
            return "by data"
        return "unknown" if dim is None and _may_have_rows(shape, rows) else dim

    def _drawn_at(self, line: str, rows: int) -> list[Shape]:
        """Shapes of the trial. Compiled code has its source's lines, but other instructions."""
        drawn = self._drawn.get(rows, [])
        shapes = [shape for at, shape in drawn if at == line]
        if shapes:
            return shapes
        source = line.rpartition(":")[0]
        return [shape for at, shape in drawn if at.rpartition(":")[0] == source]

    def _learn(self, key: tuple[str, Shape, int], dim: Dim) -> None:
        line, shape, _ = key
        self._known[key] = dim
        if dim == "by data":
            self._lines_by_data.add(line)
        if not isinstance(dim, str):
            self._dims_at[line, len(shape)].add(dim)
        if dim is None:
            self._shapes_without.add((line, shape))


def script_place() -> str:
    """File, line and instruction of the innermost frame that is the script's: so two draws of one
    line differ."""
    frame = script_frame(sys._getframe(1))
    return f"{location(frame)}:{frame.f_lasti}"


def _may_have_rows(shape: Shape, rows: int) -> bool:
    return any(length and length % rows == 0 for length in shape)


def _doubled_dim(drawn: list[Shape], shape: Shape, rows: int) -> Dim:
    """The dimension that is twice as long in what was drawn with every row twice."""
    dims: set[Dim] = set()
    for other in drawn:
        if len(other) != len(shape):
            continue
        longer = [k for k, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]
        if not longer:
            dims.add(None)
        elif all(other[k] == 2 * shape[k] for k in longer):
            dims.add(longer[0] if len(longer) == 1 else "unknown")
    dim = dims.pop() if len(dims) == 1 else "unknown"
    return "by data" if isinstance(dim, int) and shape[dim] % rows else dim


def _try_every_row_twice(
    call: ForwardCall, rows: int, before: RNGStates | None = None
) -> tuple[list[tuple[str, Shape]], RNGStates | None]:
    """The lines and shapes of what the forward draws with twice the rows; and the states of the
    generators at its end, which begin in the states `before`, or None if it fails."""
    module, args, kwargs = call.arguments  # type: ignore[misc]
    longer = False

    def repeat(x: Tensor) -> Tensor:
        nonlocal longer
        dim = next((k for k in (0, 1) if x.dim() > k and x.shape[k] == rows), None)
        if dim is None:
            return x
        longer = True
        return torch.cat((x.detach(), x.detach()), dim)

    args, kwargs = tree_map_only(Tensor, repeat, (args, kwargs))
    trial = ForwardCall(  # of the same seed, since a forward may skip layers at random
        BatchCandidates((None,)), "rank", seed=call.seed, batch_dims=call.batch_dims, trial=[]
    )
    assert trial.trial is not None
    if not longer:
        return trial.trial, None
    devices = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    others = RNGStates.capture()
    after: list[RNGStates] = []

    def run() -> None:
        if before is not None:
            before.restore()
        call_copy(module, args, kwargs, trial)
        after.append(RNGStates.capture())

    forward_calls.push(trial)
    try:
        with restoring_default_generators():
            run_in_thread(run, devices[0])
    finally:
        forward_calls.drop()
        others.restore()
    return trial.trial, after[0] if after else None


def run_in_thread(function: Callable[[], None], device: str) -> None:
    """A draw is in the midst of torch's dispatcher, whose state is that of a thread: in it, some
    functions compute otherwise."""
    casts = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    index = torch_devices.index_in_use()

    def run() -> None:
        # The module's own code may raise anything; what it drew before is known.
        with suppress(Exception), torch.no_grad():
            torch_devices.set_index(index)
            with torch.autocast(device, casts[1], enabled=casts[0]):
                function()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def call_copy(module: nn.Module, args: Any, kwargs: Any, trial: ForwardCall) -> None:
    """Call a copy of the module that shares its parameters, and leave no trace."""
    trial.caller, trial.thread = script_place(), threading.get_ident()
    with redirect_stdout(io.StringIO()), ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        twin = copy.deepcopy(module, _shared_by_copies(module))
        for part in twin.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        twin.forward(*args, **kwargs)


def _shared_by_copies(module: nn.Module) -> dict[int, Any]:
    """Parameters, by their ids, and attributes that a hook computes, such as normed weights: torch
    copies no tensor of which it knows how it was computed."""
    kept = (x for part in module.modules() for x in vars(part).values() if isinstance(x, Tensor))
    computed = {id(x): x.detach() for x in kept if not x.is_leaf}
    return computed | {id(p): p for p in module.parameters()}
