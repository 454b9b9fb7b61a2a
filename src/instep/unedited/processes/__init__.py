"""The ends of the ranks of an unedited script, and the processes that it starts: rank 0 runs these,
and all ranks get the results."""
