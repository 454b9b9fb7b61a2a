"""Collectives, on tensors and on values: typed, out of place, and differentiable."""
