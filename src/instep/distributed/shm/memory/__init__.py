"""The shared memory itself: mapping, barrier, staging buffers, reduction."""
