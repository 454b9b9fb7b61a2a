"""`apex.optimizers`: Apex's optimizers, by PyTorch's kernels.

FusedAdam, FusedSGD and FusedAdagrad are PyTorch's optimizers with Apex's arguments, and with
PyTorch's fused kernel where there is one. FusedLAMB, its mixed form and FusedNovoGrad follow
Apex's formulas in operations of PyTorch. They work on the CPU too. What PyTorch has no counterpart
of is refused by its argument's name.
"""

from instep.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from instep.compat.apex.optimizers.fused_adam import FusedAdam
from instep.compat.apex.optimizers.fused_lamb import FusedLAMB
from instep.compat.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from instep.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from instep.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
