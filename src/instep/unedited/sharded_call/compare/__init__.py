"""The comparison of a sharded call with the whole one, before its plan is relied on."""
