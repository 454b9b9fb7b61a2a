"""`jittor.dataset.Dataset`: a dataset that is its own loader, divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from instep.distributed.rendezvous import bootstrap
from instep.process.torch_private.tensors import tree_map_only
from instep.training.blocks import Block
from instep.training.loaders.block_batches import empty_block
from instep.training.shards import ShardedLoader

__all__ = ["DataLoader", "Dataset"]


@dataclass(frozen=True)
class FrontBlock(Block):
    """A rank's rows by Jittor's division: ceil(total / size) for each rank, as far as they go.

    The first ranks have the larger share: of 21 rows rank 0 of 2 has 11.
    """

    @property
    def start(self) -> int:
        """The rank's first sample."""
        return min(self.rank * -(-self.total // self.size), self.total)

    @property
    def stop(self) -> int:
        """The first sample after the rank's."""
        return min((self.rank + 1) * -(-self.total // self.size), self.total)

    @property
    def has_empty_ranks(self) -> bool:
        """Whether there are ranks without samples of this batch: of 4 rows the last rank of 3 has
        none."""
        return (self.size - 1) * -(-self.total // self.size) >= self.total


def _empty_front_block() -> FrontBlock:
    block = empty_block()
    return FrontBlock(block.rank, block.size, 0)


class Dataset:
    """Samples `self[i]` for i from 0 to `total_len`, and the loader of their batches.

        class Squares(Dataset):
            def __init__(self):
                super().__init__()
                self.set_attrs(total_len=1024)

            def __getitem__(self, k):
                return k, k * k

        for x, y in Squares().set_attrs(batch_size=256, shuffle=True): ...

    `batch_size` is the batch of the whole job: rank r of N gets ceil(n / N) samples of each batch
    of n, from sample r * ceil(n / N) on; the last ranks get fewer, or none (as with
    `instep.shard`). No sample comes twice. Batches are tensors. With `shuffle` each epoch has an
    order of its own, the same on all ranks and not Jittor's.

    `buffer_size` and `stop_grad` have no meaning: PyTorch's workers send the samples, and data
    have no gradient. A first iteration is collective.
    """

    def __init__(
        self,
        batch_size: int = 16,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        buffer_size: int = 512 * 1024 * 1024,
        stop_grad: bool = True,
        keep_numpy_array: bool = False,
        endless: bool = False,
    ) -> None:
        self.total_len: int | None = None
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.buffer_size = buffer_size
        self.stop_grad = stop_grad
        self.keep_numpy_array = keep_numpy_array
        self.endless = endless
        self.sampler: Any = None
        self._loader: ShardedLoader[Any] | None = None
        self._loads: tuple[object, ...] = ()
        """The attributes with which the loader was made."""

    def __getitem__(self, index: int) -> Any:
        """Sample `index`: numbers, numpy arrays, tensors, or containers of them."""
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__.")

    def __len__(self) -> int:
        """The number of batches of the whole job. Raises ValueError without `total_len`."""
        if self.total_len is None:
            raise ValueError(
                f"how many samples has {type(self).__name__}? Call set_attrs(total_len=...)."
            )
        if self.drop_last:
            return self.total_len // self.batch_size
        return -(-self.total_len // self.batch_size)

    @property
    def real_batch_size(self) -> int:
        """The number of this rank's samples in a batch that is not the last."""
        world = bootstrap.current()
        block = FrontBlock(world.rank, world.size, self.batch_size)
        return block.stop - block.start

    def set_attrs(self, **attributes: Any) -> Dataset:
        """Set attributes by name, and return the dataset itself. Raises AttributeError for an
        unknown one."""
        for name, value in attributes.items():
            if not hasattr(self, name):
                known = ", ".join(key for key in vars(self) if not key.startswith("_"))
                raise AttributeError(f"a Dataset has no attribute {name!r}; it has {known}.")
            setattr(self, name, value)
        return self

    def collate_batch(self, batch: list[Any]) -> Any:
        """One batch of samples, with a dimension 0 of their number."""
        return default_collate(batch)

    def to_jittor(self, batch: Any) -> Any:
        """A batch with tensors in place of numpy arrays."""
        return tree_map_only(numpy.ndarray, torch.from_numpy, batch)

    def __iter__(self) -> Iterator[Any]:
        if self.keep_numpy_array or self.endless:
            name = "keep_numpy_array" if self.keep_numpy_array else "endless"
            instead = "call .numpy() of a tensor" if self.keep_numpy_array else "loop over epochs"
            raise NotImplementedError(f"{name} is not there: {instead}.")
        if self.total_len is None:
            self.total_len = len(self)  # of a class that defines it
        if bootstrap.is_world_of_one():  # the ranks do not make this loader together
            return iter(self._make_loader())
        loads = (self.total_len, self.batch_size, self.shuffle, self.drop_last, self.num_workers)
        if self._loader is None or self._loads != (*loads, self.sampler):
            self._loader, self._loads = self._make_loader(), (*loads, self.sampler)
        return iter(self._loader)

    def _make_loader(self) -> ShardedLoader[Any]:
        whole = TorchDataLoader(
            _Samples(self),
            self.batch_size,
            shuffle=self.shuffle and self.sampler is None,
            sampler=self.sampler,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            collate_fn=self._collate,
        )
        return ShardedLoader(whole, empty_block=_empty_front_block)

    def _collate(self, batch: list[Any]) -> Any:
        return self.to_jittor(self.collate_batch(batch))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loader": None, "_loads": ()}


class _Samples(TorchDataset[Any]):
    """The samples of a Dataset, whose own length is that of its batches."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.total_len or 0

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def DataLoader(dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:  # noqa: N802 (Jittor's)
    """`dataset.set_attrs(**kwargs)`."""
    return dataset.set_attrs(*args, **kwargs)
