"""The proof: run a script at several numbers of ranks, record, compare, explain."""
