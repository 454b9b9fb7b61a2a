"""Named collectives: submitted in any order on each rank, executed in one order on all."""
