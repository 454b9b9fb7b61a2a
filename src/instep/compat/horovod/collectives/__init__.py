"""Horovod's collectives: allreduce, reducescatter, allgather, broadcast and alltoall."""
