"""Unedited scripts: every rank runs the whole script, and the ranks share its work.

It leans on `instep.training` (blocks of a batch, buckets of gradients) and `instep.distributed`.
Begin with `session` (from `start` to `stop`), `patch_table` (every function that is replaced, and
why), and `sharded_call.modules` (how a call of a module is sharded).
"""
