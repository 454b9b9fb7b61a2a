"""Mixed precision: levels, master weights and loss scaling on which all ranks agree.

A script that uses torch.autocast and torch.amp.GradScaler needs none of this: a gradient that
overflows on one rank overflows in the sum, so that every rank's GradScaler skips the same step.
"""

from instep.precision.errors import PrecisionError
from instep.precision.levels import Options
from instep.precision.mixed import Mixed, prepare
from instep.precision.scaling import LossScaler

__all__ = ["LossScaler", "Mixed", "Options", "PrecisionError", "prepare"]
