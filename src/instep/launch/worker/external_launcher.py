"""A rank that another launcher started as `python -m instep script.py`.

Its environment gets the variables that `instep run` would set (RANK, WORLD_SIZE, MASTER_ADDR and
so on), so that scripts which call init_process_group themselves work under mpirun and srun too.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence

from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.world import World, world_variables
from instep.distributed.rendezvous import port_file
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch.multi_node.master import choose_master, interface_variables, master_variables
from instep.launch.multi_node.supervisor_rendezvous import (
    Participant,
    RendezvousResult,
    Values,
    join_rendezvous,
)
from instep.process import print_line, settings
from instep.unedited import session

_MASTER = {"MASTER_ADDR", "MASTER_PORT"}
_TORCHS = {"RANK", "WORLD_SIZE", *_MASTER}


def prepare(command: Sequence[str]) -> None:
    """Set this process's environment as `instep run` sets that of a rank, if there is a launcher.

    Prints a line if there is none. Waits for the other ranks if the launcher gives no MASTER_ADDR.
    Starts this program again if strings would hash differently on the ranks. Raises LaunchError.
    """
    settings.check_variables()
    world = launchers.detect()
    if world == World():
        program = shlex.join(command[: 1 + (command[0] == "-m")])
        print_line(
            f"no launcher's variables are set, so one process runs {program}. For several: "
            f"instep run -n 2 {program}"
        )
        return
    launchers.note_launcher()
    if world.size > 1:
        session.fix_hash_seed()
    variables, secret = world_variables(world), {}
    one_host = world.one_host
    if not os.environ.keys() >= _TORCHS:
        variables[launchers.SOURCE] = world.source
    if not os.environ.keys() & _MASTER:
        result, store = _rendezvous(world, JobFingerprint.of_command(command))
        values = result.values
        variables |= master_variables(values)
        secret[settings.SECRET.name] = result.secret.hex()
        one_host = values["one_host"]
        if store is not None:
            variables[launchers.STORE_FD] = str(store.detach())
    if master := (variables | os.environ).get("MASTER_ADDR"):
        variables |= interface_variables(master, one_host=one_host)
    os.environ.update(variables | os.environ | secret)


def _rendezvous(
    world: World, fingerprint: JobFingerprint
) -> tuple[RendezvousResult, socket.socket | None]:
    """Let the ranks agree on a master; rank 0 also gets the socket that is bound to it."""
    local = endpoints.Address(port_file.LOOPBACK_HOST, 0, "")
    endpoint = launchers.endpoint(world) if world.size > 1 else local
    held: list[socket.socket] = []

    def decide(participants: Sequence[Participant]) -> Values:
        values, store = choose_master(endpoint, participants)
        held.append(store)
        return values

    participant = Participant(world.rank, world.size, fingerprint, ranks=1)
    result = join_rendezvous(endpoint, participant, decide, settings.timeout().total_seconds())
    for connection in result.connections.values():
        connection.close()
    return result, next(iter(held), None)
