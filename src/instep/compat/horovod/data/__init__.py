"""`horovod.data`: loaders whose batches a thread reads ahead."""

from instep.compat.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
