"""`apex.parallel`: DistributedDataParallel, Reducer, SyncBatchNorm and LARC as Apex had them."""

from torch.distributed import ReduceOp

from instep.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from instep.compat.apex.parallel.LARC import LARC
from instep.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
