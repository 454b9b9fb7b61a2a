"""Sharded calls: each rank runs a module's forward on its own rows, and the outputs are joined.

`modules.py` is the entry, the patch of nn.Module.__call__. A call goes through three packages, each
of which imports only from the ones before it: `plan` (which rows, which outputs; needs no process),
`run` (the module on this rank's rows) and `compare` (both ways once, whole and sharded).
"""
