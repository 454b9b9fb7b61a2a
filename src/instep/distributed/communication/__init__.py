"""Collectives on tensors and values: typed, out of place and differentiable.

It leans on `rendezvous`, `watchdog` and `shm`. Begin reading with `transport`.
"""
