"""The first draw of a forward that is not for the whole batch: its function and its line."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from instep.distributed.flight_record.script_line import location, user_frame
from instep.distributed.forbidden_collectives import forbid_collectives
from instep.process import PACKAGE_FOLDER
from instep.process.torch_private.tensors import tree_leaves, tree_map_only
from instep.training import forward_calls
from instep.training.batches.candidates import BatchCandidates
from instep.training.draws.batch_dims import call_copy, run_in_thread
from instep.training.forward_calls import ForwardCall
from instep.training.random_streams import (
    RNGStates,
    default_generators,
    restoring_default_generators,
)


class _DrawWatch:
    """Looks at the generators at each call of a function, and notes the first that has drawn.

    Args:
        has_block: whether the rows of the call are known, so that what instep draws is for them.
    """

    def __init__(self, *, has_block: bool) -> None:
        self.found = ""
        """As "poisson at /x/train.py:12"."""
        self._has_block = has_block
        self._before = _states()

    def on_event(self, frame: FrameType, event: str, function: Any) -> None:
        """For sys.setprofile."""
        is_ours = frame.f_code.co_filename.startswith(PACKAGE_FOLDER)
        now = _states()
        if not self.found and not _same(self._before, now) and not (is_ours and self._has_block):
            named = f"{function.__name__} " if event == "c_return" else ""
            self.found = f"{named}at {location(user_frame(frame))}"
        self._before = now


def find_first_own_draw(call: ForwardCall, seed: int, others: RNGStates) -> str:
    """Call a copy of the module again, and name what draws first from torch's, numpy's or Python's
    generators otherwise than for the whole batch: "poisson at /x/train.py:12"; "" if nothing does.

    Args:
        call: has its arguments still.
        seed: with which torch's generators began.
        others: numpy's and Python's states at its begin.
    """
    module, args, kwargs = call.arguments  # type: ignore[misc]
    args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    devices = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    before, found = RNGStates.capture(), ""

    def run() -> None:
        nonlocal found
        others.restore()
        for generator in generators:
            generator.manual_seed(seed)
        watch = _DrawWatch(has_block=call.batch.resolve_on_this_rank() is not None)
        sys.setprofile(watch.on_event)
        try:
            call_copy(module, args, kwargs, trial)
        finally:
            sys.setprofile(None)
            found = watch.found

    trial = ForwardCall(BatchCandidates((None,)), "rank", seed=call.seed)
    forward_calls.push(trial)
    try:
        with restoring_default_generators() as generators, forbid_collectives(RuntimeError):
            run_in_thread(run, devices[0] if devices else "cpu")
    finally:
        forward_calls.drop()
        before.restore()
    return found


def _states() -> tuple[RNGStates, list[Tensor]]:
    return RNGStates.capture(), [each.get_state() for each in default_generators()[1:]]


def _same(a: tuple[RNGStates, list[Tensor]], b: tuple[RNGStates, list[Tensor]]) -> bool:
    of_gpus = zip(a[1], b[1], strict=False)  # one may be in use only now
    return a[0].equals(b[0]) and all(torch.equal(*each) for each in of_gpus)
