"""One model on many ranks: own rows of every batch, the global batch's gradient and statistics.

It leans on `instep.distributed`. Begin with `replicas` (what `instep.replicate` does), `shards`
(what `instep.shard` does) and `buckets.reducer` (how gradients are summed during backward).
"""
