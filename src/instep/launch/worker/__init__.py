"""Inside of a rank that `instep run` has started: prepare the process and run the program."""
