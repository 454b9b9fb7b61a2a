"""A c10d backend for the ranks of one host: collectives through shared memory.

Importing this package makes it known to torch; that is what the import is for:

    import instep.shm
    torch.distributed.init_process_group("instep")

DDP, FSDP2, functional collectives, point-to-point and sub-groups then work as over Gloo, which does
whatever is not done here. See docs/shm.md.
"""

from instep.distributed.shm.backend import InstepProcessGroup
from instep.distributed.shm.joining import obstacle
from instep.distributed.shm.over_gloo import NAME
from instep.distributed.shm.registration import register
from instep.distributed.shm.shared_buckets import Resident

__all__ = ["NAME", "InstepProcessGroup", "Resident", "obstacle", "register"]

register()
