"""The run of a sharded call: own rows in, outputs joined, and the gradients' way back."""
