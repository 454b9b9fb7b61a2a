"""The script's `backward()`, in which sums over the ranks travel while it still runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.transport import overlap_group, transport
from instep.process.patching import Function
from instep.unedited.sharded_call.grad_sums import collecting
from instep.unedited.sharded_call.region import regions_below
from instep.unedited.sharded_call.work_begun import begun


def backward(
    original: Function,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward; sums in buckets where it ends in `.grad` of the parameters."""
    begun()
    rest = (grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    nested = torch._C._current_graph_task_id() != -1
    if nested or create_graph or inputs is not None:
        original(tensors, *rest)
        return
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    calls = [region.cargoes for region in regions_below(roots)]
    way = transport()
    with collecting(roots, calls, overlap_group(way) if calls else way):
        original(tensors, *rest)
