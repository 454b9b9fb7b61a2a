"""Whether a plan that holds for a call also holds for one whose rows have other values."""
