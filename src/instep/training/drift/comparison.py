"""The ranks compare their parameters, buffers and hyper-parameters every INSTEP_DRIFT_STEPS steps.

A step is a backward that sums the model's gradients. The comparison stands at its end, where all
ranks are, and costs one checksum of the model and one message of 24 bytes. Only if these differ do
the ranks send more, to find the first tensor that differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.tensors import as_bytes
from instep.distributed.communication.transport import Transport
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.process import settings
from instep.process.exit_status import group_ranks
from instep.training.drift.bit_sums import bit_sums, combine, is_comparable
from instep.training.drift.optimizers import (
    after_each_step,
    follow_optimizers,
    named_options,
    other_parameters,
    parameters_of,
)
from instep.training.errors import DriftError

Buffers = Literal["compare", "warn", "rank"]
"""What becomes of buffers that differ; see DriftCheck."""
_DROPPED = -2
"""In place of a checksum of shapes: this rank has the model no more."""
ROUNDING = 256
"""Parameters that differ by no more than this many units in the last place of the largest element
are those of ranks whose processors or kernels round differently: that is a warning."""

_LENGTHS = (
    "drops units, or draws noise, of other shapes on other ranks, as where each rank pads its rows "
    "to the longest of them: then the numbers are not those of one process. Pad all batches to one "
    "length. [INS701]"
)
_GOES_ON = "Training goes on. [INS703]"


def is_compared_step(step: int, every: int) -> bool:
    """Whether the ranks compare at the end of this step, counted from 1.

    Before the first multiple of `every` at 2, 4, 8, ...: most causes are there from the start.
    """
    if not every or step < min(every, 2):
        return False
    return step % every == 0 or (step < every and step.bit_count() == 1)


Kind = Literal["parameter", "buffer", "other", "own"]
"""Of a tensor that is compared. The last two: an optimizer's parameter that is in no replica, and
one that each rank may have for itself."""


class _Compared(NamedTuple):
    """A tensor that is compared between the ranks."""

    tensor: Tensor
    kind: Kind


class _TensorSummary(NamedTuple):
    """What a rank says of a tensor when the checksums differ."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    kind: Kind


_check_of: weakref.WeakKeyDictionary[nn.Module, DriftCheck] = weakref.WeakKeyDictionary()
_of_replicas: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The parameters of replicas, those included that are gone: their optimizers may still be in memory
on some ranks."""


def drift_check_of(
    model: nn.Module, transport: Transport, buffers: Buffers, *, is_replica: bool
) -> DriftCheck:
    """The check of a model; see DriftCheck for the arguments of a new one."""
    check = _check_of.get(model)
    if check is None:
        check = _check_of[model] = DriftCheck(model, transport, buffers, is_replica=is_replica)
    return check


def compared_models() -> list[nn.Module]:
    """The models that the ranks compare."""
    return list(_check_of)


def has_replicas() -> bool:
    """Whether any model was replicated on several ranks."""
    return bool(_of_replicas)


def is_of_replica(parameter: Tensor) -> bool:
    """Whether it is a parameter of a replica, or was one."""
    return parameter in _of_replicas


def _end_steps(optimizer: Optimizer) -> None:
    for check in list(_check_of.values()):
        if check.is_replica:
            check.end_step(optimizer)


class DriftCheck:
    """Compares one model between the ranks.

    Args:
        model: kept weakly.
        transport: of all ranks.
        buffers: "compare"; "warn" where what the script does with its rows may have made them
            different (a warning, and no error); "rank" where they are each rank's own.
        is_replica: whether it was replicated. Then all ranks step with the same optimizers, and
            parameters that these have beside the model's are compared, too.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        buffers: Buffers,
        *,
        is_replica: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self._transport = transport
        self._buffers = buffers
        self.is_replica = is_replica
        self._every = int(settings.DRIFT_STEPS)
        self.step = 0
        """How many backwards have summed gradients of the model, or steps were made without."""
        self._requests_before = 0
        """Until the first step."""
        self._without_sums: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]]
        self._without_sums = weakref.WeakKeyDictionary()
        """Of each optimizer, the step at which it stepped last, and how often since."""
        self.rows: set[int] = set()
        """How many rows the ranks had in the last backward that summed nothing."""
        self._frozen = 0
        """How many such backwards there were."""
        self._outside = WeakTensorKeyDictionary()
        """What has a gradient by them."""
        self.drawn_shapes = -1
        """A checksum of the shapes of what the last forward has drawn for this rank's rows; -1
        where it has no rows."""
        self._same_at = 0
        self._warned: set[str] = set()
        if self._every:
            follow_optimizers()
        if self._every and is_replica:  # else one rank alone may have an optimizer of its own
            after_each_step(_end_steps)

    def end_backward(self, requests: int = 0) -> None:
        """A backward has summed gradients of the model: compare if it is time to. Collective.

        `requests`: how many batches this rank has requested. Raises DriftError on every rank.
        """
        self.step += 1
        if self.step == 1:
            self._requests_before = requests
        if is_compared_step(self.step, self._every):
            self.compare(requests - self._requests_before)

    def end_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. Where no backward has summed gradients since its last step, as
        with those of torch.autograd.grad, compare if it is time to. Collective then."""
        last, count = self._without_sums.get(optimizer, (-1, 0))
        if last != self.step:
            self._without_sums[optimizer] = self.step, 0
            return
        model = self._model()
        own = set() if model is None else self._own(model)
        is_own = any(id(each) in own for each in parameters_of(optimizer))
        if not is_own:
            return
        self.step += 1
        self._without_sums[optimizer] = self.step, count + 1
        if is_compared_step(count + 1, self._every):
            self.compare()

    def is_due(self) -> bool:
        """Whether the next step will be compared."""
        return is_compared_step(self.step + 1, self._every)

    def is_frozen_due(self) -> bool:
        """Whether to look for what is trained by a backward through the model that sums nothing."""
        self._frozen += 1
        return self._frozen == 1 or is_compared_step(self._frozen, self._every)

    def note_own(self, parameters: Iterable[Tensor]) -> None:
        """The model has these parameters."""
        _of_replicas.update((each, None) for each in parameters)

    def note_outside(self, leaves: Iterable[Tensor]) -> None:
        """A backward through the model computes the gradients of these tensors, which are in no
        replica."""
        self._outside.update((each, None) for each in leaves)

    def _own(self, model: nn.Module) -> set[int]:
        """The ids of the model's parameters, and of what is trained through it."""
        outside = (each for each in self._outside if not self._has_rows(each))
        return {id(each) for each in chain(model.parameters(), outside)}

    def _has_rows(self, tensor: Tensor) -> bool:
        """Whether it may have an entry for each of a rank's rows, and is the rank's own: where the
        ranks have as many rows as it is long. Where they have not, the shapes tell."""
        return bool(tensor.dim()) and {tensor.shape[0]} == self.rows

    def compare(self, requests: int = 0) -> None:
        """Compare now. Collective. Raises DriftError on every rank.

        A model that the script has dropped may be there on some ranks still: when Python finds
        objects that refer to each other is each rank's own matter.
        """
        model = self._model()
        if model is None:
            self._exchange([0, 0, _DROPPED])
            return
        tensors = dict(self._tensors(model))
        sums = bit_sums(each.tensor for each in tensors.values())
        options = named_options({id(p): name for name, p in model.named_parameters()})
        texts = {name: repr(value) for name, value in sorted(options.items())}
        others = list(tensors), texts, requests
        mine = [combine(sums), crc32(repr(others).encode()), self.drawn_shapes]
        parts = self._exchange(mine)
        if any(part[2] == _DROPPED for part in parts):
            return
        if any(part[:2] != mine[:2] for part in parts):
            self._raise_difference(tensors, sums.tolist(), texts, requests)
        if len({part[2] for part in parts} - {-1}) > 1:
            self._warn_once("lengths", f"{type(model).__name__} {_LENGTHS}")
        self._same_at = self.step

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        """All ranks' numbers."""
        message = torch.tensor(mine, device="cpu").to(self._transport.control_device)
        return [part.tolist() for part in self._transport.all_gather(message)]

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of this parameter, if it is one of the model's."""
        model = self._model()
        named = () if model is None else model.named_parameters()
        return next((name for name, p in named if p is parameter), None)

    def _tensors(self, model: nn.Module) -> Iterator[tuple[str, _Compared]]:
        for name, parameter in model.named_parameters():
            if is_comparable(parameter):
                yield f"parameter {name}", _Compared(parameter, "parameter")
        if self.is_replica:
            known = {id(p) for each in list(_check_of) for p in each.parameters()}
            known |= {id(p) for p in list(_of_replicas)}
            own = self._own(model)
            for name, (other, is_beside) in other_parameters(own, known).items():
                is_own = not is_beside or (other in self._outside and self._has_rows(other))
                if is_comparable(other) and (isinstance(other, nn.Parameter) or not is_own):
                    yield name, _Compared(other, "own" if is_own else "other")
        if self._buffers == "rank":
            return
        for name, buffer in model.named_buffers():
            if is_comparable(buffer):
                yield f"buffer {name}", _Compared(buffer, "buffer")

    def _raise_difference(
        self,
        tensors: Mapping[str, _Compared],
        sums: Sequence[int],
        texts: Mapping[str, str],
        requests: int,
    ) -> None:
        """Find what differs first. Collective. Raises DriftError unless all of it is harmless."""
        summaries = {
            name: _TensorSummary(tuple(each.tensor.shape), str(each.tensor.dtype), total, each.kind)
            for (name, each), total in zip(tensors.items(), sums, strict=True)
        }
        requests_by_rank = self._transport.all_gather_object(requests)
        by_rank: list[tuple[dict[str, _TensorSummary], dict[str, str]]]
        by_rank = self._transport.all_gather_object((summaries, dict(texts)))
        if len({*requests_by_rank}) > 1:
            raise DriftError.of_batches(group_ranks(requests_by_rank), self._since())
        model = f" of {type(self._model()).__name__}" if len(_check_of) > 1 else ""
        for name in texts:
            values = [options.get(name) for _, options in by_rank]
            if None not in values and len({*values}) > 1:
                raise DriftError.of_option(name, group_ranks(values), self._since())
        self._raise_difference_of_tensors(tensors, [of_rank for of_rank, _ in by_rank], model)

    def _raise_difference_of_tensors(
        self,
        tensors: Mapping[str, _Compared],
        by_rank: Sequence[dict[str, _TensorSummary]],
        model: str,
    ) -> None:
        """As `_raise_difference`, of tensors: this rank's, and what each rank says of its own."""
        found, rounded = [], []
        for name in dict.fromkeys(chain.from_iterable(by_rank)):
            summaries = [of_rank.get(name) for of_rank in by_rank]
            if len({*summaries}) == 1:
                continue
            if len({each and each[:2] for each in summaries}) > 1:
                self._raise_difference_of_forms(name + model, summaries)
                continue
            compared = tensors[name]
            largest, difference = measure_difference(compared.tensor, self._transport)
            if difference == 0:  # another order in memory, or zeros of two signs
                continue
            described = name + model, group_ranks(summaries), self._since(), difference
            error = DriftError.of_tensor(*described, 0)
            if compared.kind == "own":
                trained = "Each rank has trained it on its own rows."
                self._warn_once("own", f"{error} {trained} {_GOES_ON}")
            elif is_rounding(compared.tensor.dtype, largest, difference):
                rounded.append(described)
            elif compared.kind == "buffer" and self._buffers == "warn":
                self._warn_once(name, f"{error} {_GOES_ON}")
            else:
                found.append(described)
        if found:
            raise DriftError.of_tensor(*found[0], len(found) - 1)
        if rounded:
            error = DriftError.of_tensor(*rounded[0], len(rounded) - 1, is_rounding=True)
            self._warn_once("rounded", f"{error} {_GOES_ON}")

    def _raise_difference_of_forms(
        self, name: str, summaries: Sequence[_TensorSummary | None]
    ) -> None:
        """Raise DriftError of a tensor that has another shape or dtype on some ranks, or is
        missing there, unless a rank has its own on purpose."""
        if not {"other", "own"} & {each.kind for each in summaries if each}:
            kinds = [f"{x.dtype} {list(x.shape)}" if x else "missing" for x in summaries]
            raise DriftError.of_option(name, group_ranks(kinds), self._since())

    def _since(self) -> tuple[int, int]:
        """The last step after which all was the same, and this one."""
        return max(self._same_at, 1), self.step

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn, once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn_at_script_line(text)


def name_of(parameter: Tensor) -> str:
    """The name of a parameter in a model that is compared, or its shape."""
    names = (check.name_of(parameter) for check in list(_check_of.values()))
    found = next((name for name in names if name), None)
    return f"a parameter of shape {[*parameter.shape]}" if found is None else f"parameter {found}"


def measure_difference(tensor: Tensor, transport: Transport) -> tuple[float, float]:
    """The largest element, and the largest difference from rank 0's. Collective."""
    reference = tensor.detach().clone(memory_format=torch.contiguous_format)
    message = as_bytes(reference)
    transport.broadcast(message, 0).wait()
    mine, theirs = tensor.detach().cpu(), message.view(tensor.dtype).view(tensor.shape).cpu()
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, (mine - theirs).abs()).nan_to_num(nan=float("inf"))
    pair = torch.stack([mine.abs().nan_to_num().max(), apart.max()])
    pair = pair.to(transport.control_device)
    transport.all_reduce(pair, "max").wait()
    largest, difference = pair.tolist()
    return largest, difference


def is_rounding(dtype: torch.dtype, largest: float, difference: float) -> bool:
    """Whether ranks whose processors or kernels round differently may have this difference."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    return difference <= ROUNDING * torch.finfo(dtype).eps * largest
