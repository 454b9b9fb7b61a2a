"""MASTER_ADDR and MASTER_PORT of a job, chosen at the end of the rendezvous."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from instep.distributed import interfaces
from instep.distributed.identity import endpoints
from instep.distributed.rendezvous import listening, port_file
from instep.launch.multi_node.supervisor_rendezvous import Participant, Values


def choose_master(
    endpoint: endpoints.Endpoint, participants: Sequence[Participant]
) -> tuple[Values, socket.socket]:
    """On the first participant: the master, and the bound socket on which rank 0 will listen.

    The port is free. The address is the one at which the others reached this host, or loopback if
    all participants are on one host.
    """
    networks = {participant.fingerprint.network for participant in participants}
    if len(networks) == 1:
        master = port_file.LOOPBACK_HOST
    elif isinstance(endpoint, endpoints.Address):
        master = endpoint.host
    else:
        here = participants[0].fingerprint.network
        master = next(
            participant.master
            for participant in participants
            if participant.fingerprint.network != here
        )
    store = listening.bind(master, one_host=len(networks) == 1)
    return {"master": master, "port": store.getsockname()[1], "one_host": len(networks) == 1}, store


def master_variables(values: Values) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT."""
    return {"MASTER_ADDR": values["master"], "MASTER_PORT": str(values["port"])}


def interface_variables(master: str, *, one_host: bool) -> dict[str, str]:
    """The network interface for Gloo and NCCL on this host; empty if it is unknown."""
    name = interfaces.LOOPBACK if one_host else interfaces.find_interface(master)
    return {} if name is None else dict.fromkeys(interfaces.IFNAME_VARIABLES, name)
