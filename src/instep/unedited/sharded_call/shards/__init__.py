"""The shards of a batch: one for each rank, or a fixed number of them (`--bitwise`).

With `--bitwise V` every batch is cut into V virtual shards, whatever the number of ranks, and a
rank computes several of them. `shard_group` has the collectives between all shards;
`shard_threads` lets the shards of one rank run as threads that meet. `batch_sums` finds the sums
of a forward's own that have to go over all shards.
"""
