"""Inside of a rank: prepare the process and run the user's program."""
