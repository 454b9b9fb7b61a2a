"""Mixed precision: levels, master weights and loss scaling on which all ranks agree.

A script that uses torch.autocast and torch.amp.GradScaler needs none of this: a gradient that
overflows on one rank overflows in the sum, so that every rank's GradScaler skips the same step.
The implementation is `instep.training.amp`.
"""

from instep.training.amp import LossScaler, Mixed, Options, PrecisionError, prepare

__all__ = ["LossScaler", "Mixed", "Options", "PrecisionError", "prepare"]
