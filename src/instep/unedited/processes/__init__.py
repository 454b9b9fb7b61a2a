"""Processes that an unedited script starts: rank 0 runs them, and all ranks get the results."""
