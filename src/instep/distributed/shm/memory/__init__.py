"""The shared memory itself: how it is mapped, signalled, staged and reduced."""
