"""For scripts that ask for GPUs, in each of their processes: CPUs in the place of SUITE_GPUS GPUs.

`correct[:k].view(-1)` of the time before PyTorch 1.5 is a reshape, as it then was.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any
from unittest import mock


def install() -> None:
    """Change PyTorch's classes and functions, for this whole process."""
    import torch
    import torch.distributed as dist
    from torch.nn import parallel

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def to_except_a_gpu(to: Any) -> Any:
        return lambda self, *a, **k: self if a and isinstance(a[0], int) else to(self, *a, **k)

    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = to_except_a_gpu(owner.to)  # type: ignore[attr-defined]
    view, wrap, join = torch.Tensor.view, parallel.DistributedDataParallel, dist.init_process_group

    def view_or_reshape(self: Any, *shape: Any) -> Any:
        try:
            return view(self, *shape)
        except RuntimeError:
            return self.reshape(*shape)

    class DDPOnCPUs(wrap):  # type: ignore[misc, valid-type]
        def __init__(self, module: Any, device_ids: Any = None, **more: Any) -> None:
            super().__init__(module, **more)

    torch.Tensor.cuda = torch.nn.Module.cuda = same
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.view = view_or_reshape
    torch.cuda.device_count = lambda: int(os.environ["SUITE_GPUS"])
    torch.cuda.set_device = lambda _: None
    torch.cuda.Stream = torch.cuda.current_stream = mock.MagicMock()
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    parallel.DistributedDataParallel = DDPOnCPUs
    dist.init_process_group = lambda backend=None, **more: join("gloo", **more)


IS_SPAWNED = "--multiprocessing-fork" in sys.orig_argv
if os.environ.get("SUITE_GPUS") and (IS_SPAWNED or sys.argv[:1] != ["-c"]):
    with contextlib.suppress(ImportError):
        install()
