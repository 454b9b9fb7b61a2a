"""Functions into which torch.compile must not look: they talk to other ranks, or keep state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

Function = Callable[..., Any]


def uncompiled(function: Function) -> Function:
    """`function`, into which torch.compile does not look: it talks, or keeps state.

    torch.compiler.disable would import torch.compile, which takes a second, whether it is used or
    not; this does so at the first call.
    """
    disabled: Function = _disable_dynamo(function)
    return disabled


def unlike_torch(seam: Function) -> Function:
    """`seam`, which torch.compile does not take for torch's own function of that name.

    Its table of these, by name, is drawn up anew after each init_process_group; then it held the
    seam, and collectives ran on fake tensors.
    """
    allowed = torch.compiler.allow_in_graph(seam)  # only what is allowed can be disallowed
    disallowed: Function = torch._dynamo.disallow_in_graph(allowed)
    return disallowed
