"""Parameters, and states of optimizers, of which the CPU ranks of a host keep one copy.

In a step each rank changes its part of them, and all ranks see it: nothing is sent, and a host's
memory and caches hold N - 1 copies less. To everybody else they are tensors of this rank alone.
What a script writes to them goes to pages of its own rank (`HostMemory`). The next step finds such
pages; if all ranks have written the same, it becomes the common copy. After a fork the next step
goes on in new memory, so that the child keeps the values that it has seen, as any child does.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from instep.distributed import one_copy
from instep.distributed.communication.transport import Transport
from instep.distributed.numbers import on_all_ranks
from instep.distributed.shm.memory.host_memory import HostMemory
from instep.process.malloc import release_pages
from instep.training.optimizer_shards.layout import Part, flatten
from instep.training.optimizer_shards.waiting_threads import do_others_wait

Columns = Sequence[Sequence[Tensor]]
"""Parameters, then values for each of their elements, in the same order; a column may be empty."""


class HostCopy:
    """One copy, for all ranks of a host, of the parameters of a step and of columns beside them.

    It does not keep the tensors themselves alive.
    """

    def __init__(self) -> None:
        self.slices: list[list[Tensor]] = []
        """This rank's parts as 1-D tensors, by columns. What is written to them between `prepare`
        and `publish` is seen by all ranks. Empty while there is no copy."""
        self.places: list[int] = []
        """Of each part: which parameter it belongs to."""
        self._bounds: list[tuple[int, int]] = []
        self._memory: HostMemory | None = None
        self._transport: Transport | None = None
        self._own: list[tuple[Tensor, Tensor]] = []
        """This rank's parts: as the script sees them, and as all ranks do."""
        self._layouts: list[object] = []
        self._replaced: list[Tensor] = []
        """The tensors' memory before the copy, which another thread may still be reading."""
        self._forks = 0
        self._tries, self._writes = one_copy.MOST_TRIES, one_copy.MOST_WRITES

    def prepare(
        self,
        columns: Columns,
        own_parts: Callable[[], Sequence[Part]],
        transport: Transport,
        views: Sequence[Tensor] = (),
    ) -> bool:
        """Let the copy be what the ranks see, before they change their parts. Collective.

        Args:
            columns: dense tensors, of the same layout on all ranks.
            own_parts: gives the parts of the parameters that this rank changes; all ranks' parts
                together are all elements.
            views: those of the caller, who replaces them when there is a copy.

        Returns whether there is a copy, which is made if the ranks can have one. Where it is given
        up, each rank has its own values in memory of its own again.
        """
        if self._replaced and do_others_wait():
            self._release_replaced()
        if self._memory is None:
            if not self.can_begin(columns[0], transport):
                return False
            self._tries -= 1
            if not (one_copy.are_near(transport) and self._can_move(columns, views, transport)):
                return False
            return self._make(columns, own_parts(), transport)
        if transport is self._transport and self._is_current(self._memory, columns, transport):
            return True
        self._memory.leave()  # also if the job has other ranks by now
        self._memory, self.slices, self._own = None, [], []
        return False

    def can_begin(self, parameters: Sequence[Tensor], transport: Transport) -> bool:
        """Whether `prepare` would try to make a copy; the same on all ranks."""
        return self._tries > 0 and one_copy.can_share(transport) and are_many(parameters)

    def slices_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of tensors with the parameters' layouts, 1-D; of no tensors, none."""
        pairs = zip(self.places, self._bounds, strict=True) if tensors else ()
        return [flatten(tensors[place])[start:stop] for place, (start, stop) in pairs]

    def expect_writes(self) -> None:
        """What all ranks write before the next step does not count among the script's writes."""
        self._writes += 1

    def publish(self) -> None:
        """Return when all ranks have changed their parts."""
        assert self._transport is not None
        self._transport.barrier()

    def _can_move(self, columns: Columns, views: Sequence[Tensor], transport: Transport) -> bool:
        """Whether all ranks have the same values, in memory that nobody else has. Collective."""
        tensors = [tensor for column in columns for tensor in column]
        known = Counter(view.untyped_storage().data_ptr() for view in views)
        are_alone = all(self._is_alone(tensor, known) for tensor in tensors)
        return on_all_ranks(are_alone, transport) and _are_equal(map(_bytes, tensors), transport)

    def _is_alone(self, tensor: Tensor, views: Counter[int]) -> bool:
        """Whether nobody else would miss the values of this tensor in their memory; `views`: how
        many there are of a storage, by its address."""
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_cpu:
            return False
        if tensor.is_inference() or tensor.is_shared():
            return False
        # PyTorch's own memory, or ours: an array of NumPy's is nobody's that could be counted.
        is_own = tensor.untyped_storage().resizable() or _layout(tensor) in self._layouts
        known = views[tensor.untyped_storage().data_ptr()]
        return is_own and not one_copy.has_other_users(tensor, known)

    def _make(self, columns: Columns, parts: Sequence[Part], transport: Transport) -> bool:
        tensors = [tensor for column in columns for tensor in column]
        memory = one_copy.open_one_copy(sum(map(one_copy.size_in_memory, tensors)), transport)
        if memory is None:
            return False
        places = {id(parameter): place for place, parameter in enumerate(columns[0])}
        self.places = [places[id(part.parameter)] for part in parts]
        self._bounds = [(part.start, part.stop) for part in parts]
        self._memory, self._transport, self._forks = memory, transport, one_copy.forks.count
        views: list[Tensor] = []
        slices: list[list[Tensor]] = []
        offset = 0
        for column in columns:
            begin, shared = len(views), []
            for tensor in column:
                views.append(memory.private(tensor, offset))
                shared.append(memory.shared(tensor, offset))
                offset += one_copy.size_in_memory(tensor)
            slices.append(self.slices_of(shared))
            self._own += zip(self.slices_of(views[begin:]), slices[-1], strict=True)
            for own, value in zip(slices[-1], self.slices_of(column), strict=True):
                own.copy_(value)
        self.slices = slices
        self._layouts = list(map(_layout, views))
        transport.barrier()
        for tensor, view in zip(tensors, views, strict=True):
            self._replaced.append(tensor.data)
            tensor.data = view
        if do_others_wait():
            self._release_replaced()
        return True

    def _release_replaced(self) -> None:
        for tensor in self._replaced:
            if tensor.untyped_storage().resizable():  # PyTorch's own memory
                release_pages(tensor.data_ptr(), tensor.nbytes)
        self._replaced = []

    def _is_current(self, memory: HostMemory, columns: Columns, transport: Transport) -> bool:
        """Whether the copy is what the script sees on all ranks, or can become it."""
        has_moved = self._layouts != [_layout(tensor) for column in columns for tensor in column]
        seen = torch.tensor(
            [has_moved, memory.has_private_pages(), self._forks != one_copy.forks.count],
            dtype=torch.int32,
            device="cpu",
        )
        transport.all_reduce(seen, "max").wait()
        has_moved, is_written, has_forked = map(bool, seen.tolist())
        if has_moved or (is_written and not self._accept_writes(memory, transport)):
            return False
        if has_forked:
            self._forks = one_copy.forks.count
            if not one_copy.write_to_new_memory(memory, transport):
                return False
        if is_written or has_forked:
            for view, shared in self._own:
                shared.copy_(view)
            transport.barrier()
            memory.drop_private_pages()
        return True

    def _accept_writes(self, memory: HostMemory, transport: Transport) -> bool:
        """Whether all ranks see the same after what the script has written, which it does not do
        too often. Otherwise there is no other try."""
        self._writes -= 1
        if _are_equal([memory.private_bytes()], transport) and self._writes >= 0:
            return True
        self._tries = 0
        return False


def are_many(parameters: Sequence[Tensor]) -> bool:
    """Whether one copy of parameters pays; the same on all ranks."""
    return sum(map(Tensor.numel, parameters)) >= one_copy.FEWEST_ELEMENTS


def _are_equal(parts: Iterable[memoryview], transport: Transport) -> bool:
    """Whether all ranks have the same bytes. Collective."""
    code = 0
    for part in parts:
        code = crc32(part, code)
    codes = torch.tensor([code, -code], dtype=torch.int64, device="cpu")
    transport.all_reduce(codes, "max").wait()
    return not codes.sum().item()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor. (`numpy()` would take its storage the right to be resized.)"""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _layout(tensor: Tensor) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
