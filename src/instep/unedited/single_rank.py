"""A world of one: random numbers are those of any other world, and everything else is untouched.

It imports neither torch nor what is needed to run on several ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from instep.process.patching import Patch, PatchHandle
from instep.training.drift.whole_gradients import StepCheck
from instep.unedited import launcher_env, seeds


class SingleRankSession:
    """What is installed in a world of one, until `end`."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        """`patches`: those that are installed beside the seeds'."""
        self.seed = seeds.choose_seed()
        seeds.seed_everything(self.seed)
        launcher_env.mask()
        self._step_check = StepCheck(lambda line: print(line, file=sys.stderr, flush=True))
        self._patches = PatchHandle([*patches, *seeds.SEED_PATCHES])

    def end(self) -> None:
        """Restore everything."""
        launcher_env.restore()
        self._patches.remove()
        self._step_check.end()
