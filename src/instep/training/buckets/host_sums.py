"""The sums of gradients, of which the CPU ranks of a host keep one copy.

Each rank sums its share of every gradient into memory that all ranks see, and nothing is copied
afterwards. To everybody else the sums are tensors of this rank alone: what a script writes to one
goes to pages of its own rank (`HostMemory`). Before the next sums the ranks ask each other whether
somebody still has a sum, which then keeps its values in memory of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from instep.distributed import one_copy
from instep.distributed.communication.transport import Transport
from instep.distributed.shm.memory.host_memory import HostMemory
from instep.training.buckets.weight_factors import Factors, multiply_shares


class SumState(NamedTuple):
    """What `HostSums.prepare` has to know of every rank: whether something is so on any of them."""

    is_strided: bool
    """A gradient is not contiguous."""
    is_held: bool = False
    """Somebody still has a sum, or has moved it to other memory."""
    is_written: bool = False
    """The script has written to a sum."""
    has_forked: bool = False
    """The process has forked since the last sums."""

    @classmethod
    def of(cls, counts: Tensor) -> SumState:
        """By the number of ranks on which each is so."""
        return cls(*map(bool, counts.tolist()))


class HostSums:
    """The sums of some gradients: contiguous tensors of one dtype, of the same sizes on all ranks
    and in all steps."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self._sums: dict[int, Tensor] = {}
        """As this rank's script sees them."""
        self._shared: dict[int, Tensor] = {}
        """As all ranks see them."""
        self._addresses: list[int] = []
        self._tries, self._writes = one_copy.MOST_TRIES, one_copy.MOST_WRITES
        self._forks = 0

    def can_begin(self, parameters: Collection[Tensor], transport: Transport) -> bool:
        """Whether `prepare` may be called; the same on all ranks."""
        return (
            self._tries > 0
            and sum(map(Tensor.numel, parameters)) >= one_copy.FEWEST_ELEMENTS
            and one_copy.can_share(transport)
            and all(map(Tensor.is_floating_point, parameters))
        )

    def state(self, grads: Iterable[Tensor]) -> SumState:
        """The state of this rank."""
        is_strided = not all(grad.is_contiguous() for grad in grads)
        if self._memory is None:
            return SumState(is_strided)
        sums = self._sums.values()
        has_moved = self._addresses != [each.data_ptr() for each in sums]  # share_memory_()
        is_held = has_moved or any(map(one_copy.has_other_users, sums))
        is_written = self._memory.has_private_pages()
        return SumState(is_strided, is_held, is_written, self._forks != one_copy.forks.count)

    def prepare(
        self, parameters: Mapping[int, Tensor], state: SumState, transport: Transport
    ) -> bool:
        """Whether the sums of the gradients of these can be written to memory of all ranks;
        otherwise each rank is to have its own. `state`: of all ranks. Collective."""
        if state.is_held or (state.is_written and self._writes == 0):
            self._leave()
            return False
        return not state.is_strided and self._has_memory(parameters, state, transport)

    def sum(
        self, grads: Mapping[int, Tensor], factors: Mapping[int, Factors], transport: Transport
    ) -> dict[int, Tensor]:
        """The sums over the ranks, after `prepare`: of this rank's gradients, which are in the same
        order on all ranks, and what all ranks' factors give. Collective."""
        multiply_shares(factors, self._shared, transport)
        if grads:
            of_host: Any = transport  # a SharedMemoryTransport, or one that calls it
            shared = [self._shared[key].view(-1) for key in grads]
            of_host.all_reduce_to_host(list(grads.values()), shared, "sum")
        else:
            transport.barrier()
        return {key: self._sums[key] for key in (*grads, *factors)}

    def _leave(self) -> None:
        """Let whoever has a sum keep it, and share no more if the script writes to sums."""
        assert self._memory is not None
        self._memory.leave()
        self._memory, self._sums, self._shared = None, {}, {}
        self._tries = self._tries - 1 if self._writes else 0

    def _has_memory(
        self, parameters: Mapping[int, Tensor], state: SumState, transport: Transport
    ) -> bool:
        """Whether there is memory in which nobody has a sum. Collective."""
        if self._memory is None:
            memory = self._memory = self._open(parameters, transport)
            return memory is not None
        if state.has_forked:
            self._forks = one_copy.forks.count
            if not one_copy.write_to_new_memory(self._memory, transport):
                self._writes = 0
                self._leave()
                return False
        if state.is_written or state.has_forked:
            self._writes -= state.is_written
            self._memory.drop_private_pages()
        return True

    def _open(self, parameters: Mapping[int, Tensor], transport: Transport) -> HostMemory | None:
        ends = list(accumulate(map(one_copy.size_in_memory, parameters.values())))
        memory = None
        if one_copy.are_near(transport):
            memory = one_copy.open_one_copy(ends[-1], transport)
        if memory is None:
            self._tries = 0
            return None
        for (key, parameter), offset in zip(parameters.items(), (0, *ends), strict=False):
            self._sums[key] = memory.private(parameter, offset).data  # without a base
            self._shared[key] = memory.shared(parameter, offset).data
        self._addresses = [each.data_ptr() for each in self._sums.values()]
        self._forks = one_copy.forks.count
        return memory
