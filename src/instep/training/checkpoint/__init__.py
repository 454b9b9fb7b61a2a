"""Checkpoints: everything that a training needs to go on, whole on disk or absent."""
