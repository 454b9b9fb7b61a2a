"""Processes that an unedited script starts: rank 0 runs them, all ranks get the outcome."""
