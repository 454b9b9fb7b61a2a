"""Unedited scripts: every rank runs the whole script, and the work is divided inside of it.

It leans on `instep.training` and `instep.distributed`. Begin with `session` (from `start` to
`stop`), `patch_table` (every function that instep answers for, and why) and
`sharded_call.modules` (how a call of a module is divided).
"""
