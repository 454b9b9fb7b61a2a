"""The run of a sharded call: own rows in, outputs joined, gradients summed."""
