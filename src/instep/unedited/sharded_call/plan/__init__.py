"""The plan of a sharded call: which rows are this rank's, and what its outputs are.

Nothing here communicates.
"""
