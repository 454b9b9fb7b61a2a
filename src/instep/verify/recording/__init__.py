"""Inside of a recorded rank: what is recorded of a run, and what is changed in it."""
