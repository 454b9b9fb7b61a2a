"""A c10d backend for the ranks of one host: collectives through shared memory.

Importing this package registers the backend with torch:

    import instep.shm
    torch.distributed.init_process_group("instep")

DDP, FSDP2, functional collectives, point-to-point and sub-groups then work as over Gloo, to which
everything else is left. It leans on `process` and the errors of `distributed`. Begin reading with
`backend` (the methods that torch calls), `exchange` (the collectives) and `memory.signals` (the
barrier). See docs/shm.md.
"""

from instep.distributed.shm.across_hosts import ProcessGroupAcrossHosts
from instep.distributed.shm.backend import InstepProcessGroup
from instep.distributed.shm.joining import obstacle
from instep.distributed.shm.over_gloo import NAME, ProcessGroupOverGloo
from instep.distributed.shm.registration import register
from instep.distributed.shm.shared_buckets import Resident

__all__ = [
    "NAME",
    "InstepProcessGroup",
    "ProcessGroupAcrossHosts",
    "ProcessGroupOverGloo",
    "Resident",
    "obstacle",
    "register",
]

register()
