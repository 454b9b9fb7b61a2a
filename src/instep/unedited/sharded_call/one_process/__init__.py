"""The choice to go on as one process: rank 0, with the cores of all ranks of its host."""
