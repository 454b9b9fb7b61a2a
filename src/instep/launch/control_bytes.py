"""The words that a supervisor and a rank say on the line between them: one byte each."""

GO = b"g"
"""To the rank: the guard answers for it now, its program may begin."""
READY = b"r"
"""From the rank: it takes an interrupt quietly from now on."""
FAILED = b"f"
"""From the rank: its failure file is written."""
