"""Loaders whose workers load whole batches as in one process, on each rank or in turn."""
