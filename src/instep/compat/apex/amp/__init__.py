"""`from apex import amp`: the functions of Apex's amp, implemented by `instep.precision`.

Differences from Apex:

- It works on the CPU too, where half precision is bfloat16 unless float16 is asked for.
- Functions are cast by PyTorch's autocast and its lists; on a CPU to float32 by Apex's list.
- An overflow on any rank skips the step on all of them.
- O2's checkpoints hold the master weights, so that a resumed run continues bit for bit.
- A checkpoint that is loaded, or a broadcast, after the first step reaches the master weights too.
"""

from instep.compat.apex.amp._amp_state import _amp_state as _amp_state
from instep.compat.apex.amp._amp_state import master_params
from instep.compat.apex.amp.amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from instep.compat.apex.amp.frontend import initialize, load_state_dict, state_dict
from instep.compat.apex.amp.handle import disable_casts, scale_loss

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
