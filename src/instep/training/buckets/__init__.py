"""Sums of gradients over the ranks, in buckets: planned, sent, compressed and checked.

`layout` plans buckets, `bucket_sums` sends them, `compression` has the codecs. `reducer` uses them
for replicas; `instep.unedited.sharded_call` and Apex's DistributedDataParallel do so too.
"""
