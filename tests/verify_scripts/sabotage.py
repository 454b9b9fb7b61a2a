"""Ways to break instep's core, inside the process of a rank."""

import instep
from instep.distributed.communication import transport
from instep.training import blocks, random_streams, shards
from instep.training.normalization import batch_statistics


def mean_of_means():
    blocks.Block.fraction = property(lambda block: 1 / block.size)


def summed():
    blocks.Block.fraction = property(lambda block: 1.0)


def unsplit():
    blocks.Block.slice = lambda block, batch: batch


def padded():
    def rows(block, batch):
        count = -(-block.total // block.size)
        return [batch[(block.rank * count + k) % block.total] for k in range(count)]

    blocks.Block.slice = rows


def dropped():
    def rows(block, batch):
        count = block.total // block.size
        return batch[block.rank * count : (block.rank + 1) * count]

    blocks.Block.slice = rows


def shuffled_by_rank():
    honest = shards.broadcast_seed
    shards.broadcast_seed = lambda: honest() + instep.rank


def shuffled_by_size():
    honest = shards.broadcast_seed
    shards.broadcast_seed = lambda: honest() + instep.world_size


def never_reduced():
    for way in (transport.ProcessGroupTransport, transport.SharedMemoryTransport):
        way.all_reduce = lambda self, tensor, op: transport.Completed()
        way.all_reduce_each = lambda self, tensors, op: None


def augmented_by_rank():
    def drawn_as_it_comes(dataset, sample):
        return dataset.dataset[sample.index]

    random_streams.SeededDataset.__getitem__ = drawn_as_it_comes


def unsynchronised_norm():
    batch_statistics._scope = lambda *tensors: "rank"


CORES = {
    sabotage.__name__: sabotage
    for sabotage in (
        mean_of_means,
        summed,
        unsplit,
        padded,
        dropped,
        shuffled_by_rank,
        shuffled_by_size,
        never_reduced,
        augmented_by_rank,
        unsynchronised_norm,
    )
}
