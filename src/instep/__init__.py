"""instep: write for one process, run on many, get the same numbers."""
