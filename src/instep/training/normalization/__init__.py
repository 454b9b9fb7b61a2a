"""Normalisation by statistics of the global batch."""
