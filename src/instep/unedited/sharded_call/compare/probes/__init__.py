"""Whether a plan that holds for one call also holds for others: it is tried with other values."""
