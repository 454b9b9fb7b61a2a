"""Mixed precision: levels, master weights and loss scaling on which all ranks agree.

A script that uses torch.autocast and torch.amp.GradScaler needs none of this: a gradient that
overflows on one rank overflows in the sum, so that every rank's GradScaler skips the same step.
"""

from instep.training.amp.errors import PrecisionError
from instep.training.amp.levels import Options
from instep.training.amp.loss_scaler import LossScaler
from instep.training.amp.mixed import Mixed, prepare

__all__ = ["LossScaler", "Mixed", "Options", "PrecisionError", "prepare"]
