"""Random numbers of the global batch: dropout masks, and what the forward of a replica draws by
hand or inside of a layer of torch's.

A draw with an entry for each row is made for all rows, and each rank takes its own. Begin reading
in `replica_draws`, then `dropout_masks` and `functions`.
"""
