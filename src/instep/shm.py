"""The c10d backend "instep": collectives through shared memory for the ranks of one host.

Importing this module registers it with PyTorch; see docs/shm.md. The implementation is
`instep.distributed.shm`.
"""

from instep.distributed.shm import NAME, InstepProcessGroup, Resident, obstacle, register

__all__ = ["NAME", "InstepProcessGroup", "Resident", "obstacle", "register"]
