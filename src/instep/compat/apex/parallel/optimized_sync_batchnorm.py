"""`apex.parallel.optimized_sync_batchnorm`: the SyncBatchNorm of `sync_batchnorm`."""

from instep.compat.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
