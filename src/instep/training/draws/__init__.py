"""Random numbers that the forward of a replica draws by hand, or inside of a layer of torch's.

They are those of the global batch: a draw with an entry for each row is made for all rows, and each
rank takes its own. Begin reading in `functions`.
"""
