"""NVIDIA Apex's `amp` and `parallel`, which Apex itself removed in 2025.

from instep.compat.apex import amp
from instep.compat.apex.parallel import DistributedDataParallel
"""

from instep.compat.apex import amp, parallel

__all__ = ["amp", "parallel"]
