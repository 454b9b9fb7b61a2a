"""Gradients in buckets: which travel together, how they are sent, compressed and checked."""
