"""Drift: parameters, buffers or hyper-parameters that have become different between ranks.

`comparison` is where to begin.
"""
