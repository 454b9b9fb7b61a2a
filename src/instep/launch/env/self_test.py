"""Run every collective once on small tensors and check the result. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from instep.distributed.communication import collectives, exchanges, objects, point_to_point
from instep.distributed.rendezvous.bootstrap import current

Test = Callable[[torch.device, int, int], bool]


def run_collectives(device: torch.device) -> list[tuple[str, str, float]]:
    """For each collective: its name, "ok" or the error, and the time in milliseconds."""
    world = current()
    found = []
    for name, test in TESTS.items():
        begun = time.perf_counter()
        try:
            verdict = "ok" if test(device, world.rank, world.size) else "WRONG RESULT"
        except Exception as error:  # any error is a result here
            verdict = f"{type(error).__name__}: {error}"
        found.append((name, verdict, (time.perf_counter() - begun) * 1e3))
        if verdict != "ok":
            break  # the ranks may be out of step now
    return found


def _make_input(device: torch.device, rank: int) -> Tensor:
    return torch.full((2,), float(rank + 1), device=device)


def _all_reduce(device: torch.device, rank: int, size: int) -> bool:
    total = collectives.all_reduce(_make_input(device, rank))
    return total.tolist() == [size * (size + 1) / 2] * 2


def _reduce(device: torch.device, rank: int, size: int) -> bool:
    total = collectives.reduce(_make_input(device, rank), "max")
    return rank != 0 or total.tolist() == [size] * 2


def _broadcast(device: torch.device, rank: int, size: int) -> bool:
    return collectives.broadcast(_make_input(device, rank), size - 1).tolist() == [size] * 2


def _reduce_scatter(device: torch.device, rank: int, size: int) -> bool:
    rows = torch.arange(float(size), device=device)
    return collectives.reduce_scatter(rows).tolist() == [rank * size]


def _all_gather(device: torch.device, rank: int, size: int) -> bool:
    parts = exchanges.all_gather(_make_input(device, rank))
    return [part.tolist() for part in parts] == [[k + 1] * 2 for k in range(size)]


def _gather(device: torch.device, rank: int, size: int) -> bool:
    parts = exchanges.gather(_make_input(device, rank))
    return rank != 0 or [part.tolist() for part in parts] == [[k + 1] * 2 for k in range(size)]


def _scatter(device: torch.device, rank: int, size: int) -> bool:
    parts = [_make_input(device, k) for k in range(size)] if rank == 0 else None
    return exchanges.scatter(parts).tolist() == [rank + 1] * 2


def _all_to_all(device: torch.device, rank: int, size: int) -> bool:
    rows = torch.arange(float(size), device=device) + size * rank
    parts = exchanges.all_to_all(rows)
    return [part.tolist() for part in parts] == [[rank + size * k] for k in range(size)]


def _send_and_recv(device: torch.device, rank: int, size: int) -> bool:
    """Around the ring, rank 0 first."""
    before, after = (rank - 1) % size, (rank + 1) % size
    if size == 1:
        return True
    if rank == 0:
        point_to_point.send(_make_input(device, rank), after)
        return point_to_point.recv(before).tolist() == [before + 1] * 2
    came = point_to_point.recv(before)
    point_to_point.send(_make_input(device, rank), after)
    return came.tolist() == [before + 1] * 2


def _barrier(device: torch.device, rank: int, size: int) -> bool:
    collectives.barrier()
    return True


def _broadcast_object(device: torch.device, rank: int, size: int) -> bool:
    return objects.broadcast_object({"rank": rank}) == {"rank": 0}


def _all_gather_object(device: torch.device, rank: int, size: int) -> bool:
    return objects.all_gather_object({"rank": rank}) == [{"rank": k} for k in range(size)]


def _gather_object(device: torch.device, rank: int, size: int) -> bool:
    found = objects.gather_object(rank)
    return found == (list(range(size)) if rank == 0 else None)


TESTS: dict[str, Test] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send, recv": _send_and_recv,
    "barrier": _barrier,
    "broadcast_object": _broadcast_object,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
}
