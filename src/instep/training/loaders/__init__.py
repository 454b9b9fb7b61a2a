"""The parts of sharded loaders: a rank's indices, whole batches that are sliced, the position."""
