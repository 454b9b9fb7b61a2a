"""The messages on the socket between the supervisor and a rank: one byte each."""

GO = b"g"
"""To the rank: the reaper knows it, its program may start."""
READY = b"r"
"""From the rank: it handles SIGINT now."""
FAILED = b"f"
"""From the rank: it has written its failure file."""
