"""Gradients in buckets: which of them travel together, how they are sent, compressed and checked.

`layout` plans, `grad_buckets` sends, `compression` has the codecs. The same engine serves
`instep.training.reducer`, `instep.unedited.sharded_call` and Apex's DistributedDataParallel.
"""
