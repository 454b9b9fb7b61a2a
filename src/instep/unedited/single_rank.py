"""A world of one: random numbers are those of any other world, and everything else is untouched.

It imports neither torch nor what is needed to run on several ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from instep.distributed.identity.world import World
from instep.process.patching import Patch, PatchHandle
from instep.training.drift.whole_gradients import StepCheck
from instep.unedited import launcher_env, seeds


class SingleRankSession:
    """What is installed in a world of one, until `end`."""

    def __init__(self, world: World, patches: Sequence[Patch]) -> None:
        """`patches`: those that are installed beside the seeds'."""
        self.world = world
        seeds.seed_everything(seeds.choose_seed())
        launcher_env.mask()
        self._step_check = StepCheck(lambda line: print(line, file=sys.stderr, flush=True))
        self._patches = PatchHandle([*patches, *seeds.SEED_PATCHES])

    def add_notes(self, error: BaseException) -> None:
        """As MultiRankSession has it: here nothing depends on ranks."""

    def reports_failure(
        self, message: str, error: BaseException | None, alike: Callable[[], object]
    ) -> bool:
        """As MultiRankSession has it: at once, by the only rank."""
        return True

    def end(self) -> None:
        """Restore everything."""
        launcher_env.restore()
        self._patches.remove()
        self._step_check.end()
