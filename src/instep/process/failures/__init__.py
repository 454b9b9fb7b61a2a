"""How a rank has failed: the record that it leaves, its last known position, its traceback."""
