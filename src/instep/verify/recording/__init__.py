"""Inside of a recorded rank: the recorder, and the changes that a run plan asks for."""
