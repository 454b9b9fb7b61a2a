"""A rank that another launcher has started as `python -m instep script.py`.

Its script finds what `instep run` would have told it: RANK, WORLD_SIZE, MASTER_ADDR and so on, so
that one which calls init_process_group itself works under mpirun and srun too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import port_file
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch.environment import world_variables
from instep.launch.multihost.master import choose_master, interface_variables, master_variables
from instep.launch.multihost.supervisor_rendezvous import (
    Facts,
    Participant,
    RendezvousResult,
    join_rendezvous,
)
from instep.process import settings
from instep.unedited import session

_MASTER = {"MASTER_ADDR", "MASTER_PORT"}
_TORCHS = {"RANK", "WORLD_SIZE", *_MASTER}


def prepare(command: Sequence[str]) -> None:
    """Make this process what a rank of `instep run` is. Leaves one that nobody launched alone.

    Writes this process's environment. Waits for the other ranks where the launcher does not say
    where they meet. Starts this program again where strings would hash differently on the ranks.
    Raises LaunchError.
    """
    settings.check_variables()
    world = launchers.detect()
    if world == World():
        return
    if world.size > 1:
        session.fix_hash_seed()
    told, drawn = world_variables(world), {}
    one_host = world.one_host
    if not os.environ.keys() >= _TORCHS:
        told[launchers.SOURCE] = world.source
    if not os.environ.keys() & _MASTER:
        result, store = _rendezvous(world, JobFingerprint.of_command(command))
        facts = result.facts
        told |= master_variables(facts)
        drawn[settings.SECRET.name] = result.secret.hex()
        one_host = facts["one_host"]
        if store is not None:
            told[launchers.STORE_FD] = str(store.detach())
    if master := (told | os.environ).get("MASTER_ADDR"):
        told |= interface_variables(master, one_host=one_host)
    os.environ.update(told | os.environ | drawn)


def _rendezvous(
    world: World, card: JobFingerprint
) -> tuple[RendezvousResult, socket.socket | None]:
    """The ranks meet, and rank 0 says where they will meet again; it holds the socket for it."""
    alone = endpoints.Address(port_file.LOOPBACK_HOST, 0, "")
    place = launchers.endpoint(world) if world.size > 1 else alone
    held: list[socket.socket] = []

    def decide(participants: Sequence[Participant]) -> Facts:
        facts, store = choose_master(place, participants)
        held.append(store)
        return facts

    mine = Participant(world.rank, world.size, card, ranks=1)
    result = join_rendezvous(place, mine, decide, float(int(settings.TIMEOUT)))
    for line in result.lines.values():
        line.close()
    return result, next(iter(held), None)
