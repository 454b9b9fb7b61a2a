"""What all ranks are told about where to meet, once the members of the job have met."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from instep.distributed.identity import endpoints
from instep.distributed.rendezvous import interfaces, listening, port_file
from instep.launch.multihost.supervisor_rendezvous import Facts, Participant


def choose_master(
    place: endpoints.Endpoint, participants: Sequence[Participant]
) -> tuple[Facts, socket.socket]:
    """On the first member: the master for all, and the socket that rank 0 shall listen on.

    The port is a free one. The address is the one by which the others have found this host;
    loopback where no other host takes part.
    """
    networks = {participant.card.network for participant in participants}
    if len(networks) == 1:
        master = port_file.LOOPBACK_HOST
    elif isinstance(place, endpoints.Address):
        master = place.host
    else:
        here = participants[0].card.network
        master = next(
            participant.master for participant in participants if participant.card.network != here
        )
    store = listening.bind(master, one_host=len(networks) == 1)
    return {"master": master, "port": store.getsockname()[1], "one_host": len(networks) == 1}, store


def master_variables(facts: Facts) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT."""
    return {"MASTER_ADDR": facts["master"], "MASTER_PORT": str(facts["port"])}


def interface_variables(master: str, *, one_host: bool) -> dict[str, str]:
    """What Gloo and NCCL are told on this host; nothing where it cannot be known."""
    name = interfaces.LOOPBACK if one_host else interfaces.find_interface(master)
    return {} if name is None else dict.fromkeys(interfaces.IFNAME_VARIABLES, name)
