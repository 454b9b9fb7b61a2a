"""The forward of a sharded call: the arguments of each shard, and the outputs of all of them."""
