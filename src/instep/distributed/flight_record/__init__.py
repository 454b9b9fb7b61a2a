"""The flight record: the last collectives of a rank, in memory that its watcher can read.

`recorder` (begin there) writes the record in the rank; `record_format` reads it, in any process.
It leans on `process` only.
"""
