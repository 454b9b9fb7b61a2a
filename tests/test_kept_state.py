"""State that a forward keeps outside of tensors: after sharded calls it is that of one process."""

from __future__ import annotations

import contextlib
import csv
import enum
import functools
import gc
import io
import itertools
import logging
import multiprocessing
import random
import sys
import tempfile
import threading
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue as ProcessQueue
from multiprocessing.queues import SimpleQueue as PipeQueue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.process import pending_writes
from instep.unedited.sharded_call import modules
from pool import ranks
from sharded_training import Around, sharding

pytestmark = pytest.mark.slow


class AverageMeter:
    """As scripts copy it from one another."""

    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, [0.0]

    def update(self, value: float, n: int) -> None:
        self.sum += value * n
        self.count += n
        self.values.append(value)

    def state(self) -> Any:
        return self.sum, self.count, self.values


class Settings:
    seen = 0


meter, rows_seen = AverageMeter(), 0
meters: list[AverageMeter] = []
"""They are referred to weakly elsewhere."""
totals: defaultdict[str, int] = defaultdict(int)


def count_rows(x: Tensor) -> None:
    global rows_seen
    rows_seen += len(x)


class Keeping(Around):
    """Keeps in one attribute of its own, or elsewhere, how many rows it has seen."""

    def __init__(self, kept: Any, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.kept, self.keep = kept, keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return self.body(x)


class UsingGlobals(Around):
    def forward(self, x: Tensor) -> Tensor:
        totals["rows"] += len(x)
        meter.update(2.0, len(x))
        Settings.seen += len(x)
        count_rows(x)
        return self.body(x)


def add_to_dict(module: Any, x: Tensor) -> None:
    module.kept["rows"] = module.kept.get("rows", 0) + len(x)


def add_to_list(module: Any, x: Tensor) -> None:
    next(iter(module.kept.values())).append(len(x))


def count_in_records(module: Any, x: Tensor) -> None:
    module.kept["rows"] += len(x)
    module.kept["batches"] += 1


def queue_of_processes() -> ProcessQueue[int]:
    made: ProcessQueue[int] = multiprocessing.Queue()
    made.put(0)
    return made


def referring_weakly() -> WeakValueDictionary[str, AverageMeter]:
    meters.append(AverageMeter())
    return WeakValueDictionary(meter=meters[-1])


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "list": (list, lambda m, x: m.kept.append(len(x))),
    "nested list": (lambda: {"a": [[]]}, lambda m, x: m.kept["a"][0].append(len(x))),
    "dict": (dict, add_to_dict),
    "ordered dict": (OrderedDict, add_to_dict),
    "default dict": (lambda: defaultdict(int), add_to_dict),
    "counter": (Counter, lambda m, x: m.kept.update({"rows": len(x)})),
    "set": (set, lambda m, x: m.kept.add(len(x))),
    "deque": (lambda: deque(maxlen=3), lambda m, x: m.kept.append(len(x))),
    "meter": (AverageMeter, lambda m, x: m.kept.update(0.5, len(x))),
    "namespace": (
        lambda: SimpleNamespace(rows=0),
        lambda m, x: setattr(m.kept, "rows", m.kept.rows + len(x)),
    ),
    "array": (lambda: np.zeros(2), lambda m, x: m.kept.__setitem__(0, m.kept[0] + len(x))),
    "bytes": (bytearray, lambda m, x: m.kept.append(len(x))),
    "array of numbers": (lambda: array("d"), lambda m, x: m.kept.append(len(x))),
    "array of objects": (
        lambda: np.array([0, None]),
        lambda m, x: m.kept.__setitem__(0, m.kept[0] + len(x)),
    ),
    "array of records": (
        lambda: np.array([(0, 0)], dtype=[("rows", "i8"), ("batches", "O")]),
        count_in_records,
    ),
    "view of bytes": (
        lambda: memoryview(bytearray(1)),
        lambda m, x: m.kept.__setitem__(0, m.kept[0] + len(x)),
    ),
    "queue": (Queue, lambda m, x: m.kept.put(len(x))),
    "simple queue": (SimpleQueue, lambda m, x: m.kept.put(len(x))),
    "queue of processes": (multiprocessing.Queue, lambda m, x: m.kept.put(len(x))),
    "queue of processes that stays as long": (
        queue_of_processes,
        lambda m, x: m.kept.put(m.kept.get() + len(x)),
    ),
    "pipe of processes": (multiprocessing.SimpleQueue, lambda m, x: m.kept.put(len(x))),
    "shared number": (
        lambda: multiprocessing.Value("i", 0),
        lambda m, x: setattr(m.kept, "value", m.kept.value + len(x)),
    ),
    "proxy": (lambda: types.MappingProxyType({"rows": []}), add_to_list),
    "weak keys": (lambda: WeakKeyDictionary({Settings: []}), add_to_list),
    "weak values": (referring_weakly, lambda m, x: m.kept["meter"].update(2.0, len(x))),
    "of a thread": (
        threading.local,
        lambda m, x: setattr(m.kept, "rows", getattr(m.kept, "rows", 0) + len(x)),
    ),
    "error": (
        lambda: ValueError(0),
        lambda m, x: setattr(m.kept, "args", (m.kept.args[0] + len(x),)),
    ),
    "csv writer": (lambda: csv.writer(io.StringIO()), lambda m, x: m.kept.writerow([len(x)])),
    "count": (itertools.count, lambda m, x: next(m.kept)),
    "numpy generator": (lambda: np.random.default_rng(0), lambda m, x: x.mul(m.kept.random())),
    "python generator": (lambda: random.Random(0), lambda m, x: m.kept.random()),
    "file": (io.StringIO, lambda m, x: m.kept.write(f"{len(x)} rows\n")),
    "tensor": (lambda: torch.zeros(2), lambda m, x: m.kept.add_(len(x))),
}


def state_of(kept: Any) -> Any:
    """What can be compared with `==`."""
    if isinstance(kept, AverageMeter):
        return kept.state()
    if isinstance(kept, np.ndarray | Tensor):
        return kept.tolist()
    if isinstance(kept, np.random.Generator):
        return kept.bit_generator.state
    if isinstance(kept, random.Random):
        return kept.getstate()
    if isinstance(kept, memoryview):
        return bytes(kept)
    if isinstance(kept, PipeQueue):
        return [kept.get() for _ in iter(kept.empty, True)]
    if isinstance(kept, Queue | SimpleQueue | ProcessQueue):
        return [kept.get() for _ in range(kept.qsize())]
    if isinstance(kept, types.MappingProxyType | WeakKeyDictionary | WeakValueDictionary):
        return [state_of(each) for each in kept.values()]
    if isinstance(kept, Synchronized):
        return kept.value
    if isinstance(kept, ValueError):
        return kept.args
    if isinstance(kept, threading.local):
        return vars(kept)
    if isinstance(kept, type(csv.writer(io.StringIO()))):
        owners = [getattr(part, "__self__", None) for part in gc.get_referents(kept)]
        return [state_of(owner) for owner in owners if owner is not None]
    return kept.getvalue() if isinstance(kept, io.StringIO) else kept


@pytest.mark.parametrize("kind", KEPT)
@ranks(2)
def test_what_a_forward_keeps_is_that_of_the_whole_batch(kind: str) -> None:
    make, keep = KEPT[kind]
    plain, model = Keeping(make(), keep), Keeping(make(), keep)
    x = torch.randn(6, 6)
    for _ in range(4):
        plain(x)
    with sharding() as log:
        for _ in range(4):
            model(x)
    found, expected = state_of(model.kept), state_of(plain.kept)
    assert found == expected or repr(found) == repr(expected)
    assert type(model.kept) is type(plain.kept)
    assert modules.call_counts.whole == 4
    if instep.rank == 0:
        assert "every rank computes Keeping whole" in log.getvalue()
        is_shared = "of processes" in kind
        assert ("shares with other processes" if is_shared else "kept") in log.getvalue()


class KeepingLargest(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.largest: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.largest.append(round(float(x.max()), 3))
        return super().forward(x)


@ranks(2)
def test_what_only_the_rows_of_one_rank_show_to_depend_on_them_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, batches = KeepingLargest(), torch.randn(4, 6, 6)
    with sharding():
        for x in batches:
            model(x).sum().backward()
    assert model.largest == [round(float(x.max()), 3) for x in batches]


@ranks(2)
def test_what_a_forward_keeps_in_global_variables_is_that_of_the_whole_batch() -> None:
    global rows_seen
    meter.__init__()  # type: ignore[misc]
    totals.clear()
    Settings.seen = rows_seen = 0
    model, x = UsingGlobals(), torch.randn(6, 6)
    with sharding() as log:
        for _ in range(4):
            model(x)
    assert (totals, Settings.seen, rows_seen) == ({"rows": 24}, 24, 24)
    assert meter.state() == (48.0, 24, [0.0] + [2.0] * 4)
    if instep.rank == 0:
        assert (
            "computes UsingGlobals whole: its attribute Settings.seen depends on the rows"
            in log.getvalue()
        )


@ranks(2)
def test_what_a_forward_keeps_in_a_closure_is_that_of_the_whole_batch() -> None:
    seen: list[int] = []

    class Appending(Around):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.body(x)

    model, x = Appending(), torch.randn(6, 6)
    with sharding() as log:
        for _ in range(4):
            model(x)
    assert seen == [6] * 4
    if instep.rank == 0:
        assert "computes Appending whole: the variable seen depends on the rows" in log.getvalue()


@ranks(2)
def test_what_a_forward_keeps_in_default_arguments_is_that_of_the_whole_batch() -> None:
    kept: list[int] = []

    class Counting(Around):
        def forward(self, x: Tensor, seen: list[int] = kept) -> Tensor:
            seen.append(len(x))
            return self.body(x)

    model, x = Counting(), torch.randn(6, 6)
    with sharding() as log:
        for _ in range(4):
            model(x)
    assert kept == [6] * 4
    if instep.rank == 0:
        assert "computes Counting whole: the variable seen depends on the rows" in log.getvalue()


totals_of_rows = types.ModuleType("totals_of_rows")


class CountingInModules(Around):
    def __init__(self) -> None:
        super().__init__()
        self.own = types.ModuleType("own")
        self.own.rows = []

    def forward(self, x: Tensor) -> Tensor:
        totals_of_rows.rows += len(x)
        self.own.rows.append(len(x))
        scores: Tensor = self.body(x)
        return scores


@ranks(2)
def test_what_a_forward_keeps_in_a_module_made_by_hand_is_that_of_the_whole_batch() -> None:
    totals_of_rows.rows = 0
    model, x = CountingInModules(), torch.randn(6, 6)
    with sharding():
        for _ in range(4):
            model(x)
    assert totals_of_rows.rows == 24
    assert model.own.rows == [6] * 4


class Phase(enum.Enum):
    WARM = 1
    TRAINED = 2


class Namespace(types.ModuleType):
    """Options that are read as those of a module are."""


@functools.singledispatch
def shifted(x: object) -> Any:
    return x


@shifted.register
def _(x: Tensor) -> Tensor:
    counts["rows"] += len(x)
    return x


counts: Counter[str] = Counter()
namespace = Namespace("namespace")
generated: dict[str, Any] = {}
exec("def shift(x):\n    shift.rows += len(x)\n    return x", generated)
shift = generated["shift"]


class CountingInItsClass(Around):
    class Counts:
        rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.Counts.rows += len(x)
        return self.body(x)


class CountingInABuffer(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(3))
        self.shift.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.shift.rows += len(x)
        return self.body(x) + self.shift


class CountingInATensor(CountingInABuffer):
    def __init__(self) -> None:
        super().__init__()
        self.own = self._buffers.pop("shift")

    def forward(self, x: Tensor) -> Tensor:
        self.own.rows += len(x)
        return self.body(x) + self.own


class CountingInAMember(Around):
    def forward(self, x: Tensor) -> Tensor:
        Phase.TRAINED.rows += len(x)  # type: ignore[attr-defined]
        return self.body(x)


class CountingInANamespace(Around):
    def forward(self, x: Tensor) -> Tensor:
        namespace.rows += len(x)
        return self.body(x)


class CountingByType(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(shifted(x))


class CountingInGeneratedCode(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(shift(x))


COUNTING: dict[type[Around], Callable[[Any], int]] = {
    CountingInItsClass: lambda model: model.Counts.rows,
    CountingInABuffer: lambda model: model.shift.rows,
    CountingInATensor: lambda model: model.own.rows,
    CountingInAMember: lambda model: Phase.TRAINED.rows,  # type: ignore[attr-defined]
    CountingInANamespace: lambda model: namespace.rows,
    CountingByType: lambda model: counts["rows"],
    CountingInGeneratedCode: lambda model: shift.rows,
}


@pytest.mark.parametrize("kind", COUNTING)
@ranks(2)
def test_rows_are_counted_once_wherever_a_forward_counts_them(kind: type[Around]) -> None:
    CountingInItsClass.Counts.rows = 0
    Phase.TRAINED.rows = 0  # type: ignore[attr-defined]
    namespace.rows = shift.rows = 0
    counts.clear()
    model, x = kind(), torch.randn(6, 6)
    with sharding():
        for _ in range(4):
            model(x)
    assert COUNTING[kind](model) == 24


class KeepingAWindow(Around):
    """The last three batches of scores, of which the first calls have fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.window: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x)
        self.window.append(scores.detach())
        self.window = self.window[-3:]
        return scores - torch.cat(self.window).mean(0)


@ranks(2)
def test_a_window_of_batches_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = KeepingAWindow()
    batches = torch.randn(6, 6, 6)
    expected = [KeepingAWindow.forward(model, x) for x in batches]
    model.window = []
    with sharding() as log:
        for x, scores in zip(batches, expected, strict=True):
            torch.testing.assert_close(model(x), scores)
    assert [len(each) for each in model.window] == [6, 6, 6]
    if instep.rank == 0:
        assert "adds tensors to those that it keeps in window" in log.getvalue()


lengths: list[int] = []


class Recorder:
    """A class of the script's whose methods name a global variable."""

    def add(self, x: Tensor) -> None:
        lengths.append(len(x))


class Calling(Around):
    def forward(self, x: Tensor, function: Callable[[Tensor], Any]) -> Tensor:
        function(x.detach().sum(1))
        return self.body(x)


class Measuring(Around):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()

    def forward(self, x: Tensor, _: Any) -> Tensor:
        self.recorder.add(x)
        return self.body(x)


class Decorated(Around):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor, _: Any) -> Tensor:
        lengths.append(len(x))
        return self.body(x)


class Computed(Around):
    @property
    def scale(self) -> float:
        lengths.append(6)
        return float(len(lengths))

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return self.body(x) * self.scale


def append_length(x: Tensor) -> None:
    lengths.append(len(x))


NAMING: dict[str, tuple[type[Around], Callable[[], Any]]] = {
    "an argument names it": (Calling, lambda: append_length),
    "an argument's closure": (
        Calling,
        lambda: (lambda kept: lambda x: kept.append(len(x)))(lengths),
    ),
    "a method of the list": (Calling, lambda: lengths.append),
    "a partial": (Calling, lambda: partial(lambda kept, x: kept.append(len(x)), lengths)),
    "a method of an object": (Measuring, lambda: None),
    "within a library's decorator": (Decorated, lambda: None),
    "a property": (Computed, lambda: None),
}


@pytest.mark.parametrize("case", NAMING)
@ranks(2)
def test_a_list_that_a_forward_reaches_through_functions_is_appended_to_once(case: str) -> None:
    lengths.clear()
    cls, make = NAMING[case]
    model, x, function = cls(), torch.randn(6, 6), make()
    with sharding():
        for _ in range(4):
            model(x, function)
    assert [x if isinstance(x, int) else len(x) for x in lengths] == [6] * 4


class DrawingByMethod(Around):
    def __init__(self) -> None:
        super().__init__()
        self.draws = [random.Random(0).random, np.random.default_rng(0).random]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (1 + sum(draw() for draw in self.draws))


@ranks(2)
def test_the_method_of_a_generator_draws_for_the_whole_batch() -> None:
    torch.manual_seed(0)
    plain, model, x = DrawingByMethod(), DrawingByMethod(), torch.randn(6, 6)
    model.load_state_dict(plain.state_dict())
    expected = [plain(x) for _ in range(4)]
    with sharding():
        outputs = [model(x) for _ in range(4)]
    assert all(map(torch.allclose, outputs, expected))


class Normalizer:
    """A network beside the model, as scripts keep one."""

    calls = 0

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(6)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)

    def scale(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm.forward(x)


def call_first(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


class Calling(Around):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.function(x))


PLACES = (
    "closure",
    "default argument",
    "method",
    "method of a module",
    "object",
    "partial",
    "function in a closure",
)


def through(normalizer: Normalizer, place: str) -> Callable[[Tensor], Tensor]:
    """A function that calls a network, which it has in this place."""
    norm = normalizer.norm

    def by_default(x: Tensor, norm: nn.Module = norm) -> Tensor:
        return norm.forward(x)

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "closure": lambda x: norm.forward(x),
        "default argument": by_default,
        "method": normalizer.scale,
        "method of a module": norm.forward,
        "object": normalizer,
        "partial": partial(call_first, norm.forward),
        "function in a closure": lambda x: by_default(x),
    }
    return functions[place]


@pytest.mark.parametrize("place", PLACES)
@ranks(2)
def test_a_network_from_outside_sees_each_batch_once(place: str) -> None:
    plain, given = Normalizer(), Normalizer()
    call_plain = through(plain, place)
    model, x = Calling(through(given, place)), torch.randn(6, 6)
    for _ in range(3):
        call_plain(x)
    with sharding() as log:
        for _ in range(3):
            model(x).sum().backward()
    assert given.calls == plain.calls
    assert all(map(torch.equal, given.norm.buffers(), plain.norm.buffers()))
    if instep.rank == 0:
        assert "every rank computes Calling whole: its forward changes" in log.getvalue()


@ranks(2)
def test_a_network_that_only_its_call_shows_sees_each_batch_once() -> None:
    norm, plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    class Normalizing(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model, x = Normalizing(), torch.randn(6, 6)
    forward, given = model.forward, itertools.repeat(norm).__next__
    model.forward = lambda x: forward(given()(x))  # type: ignore[method-assign]
    for _ in range(3):
        plain(x)
    with sharding() as log:
        for _ in range(3):
            model(x).sum().backward()
    assert all(map(torch.equal, norm.buffers(), plain.buffers()))
    if instep.rank == 0:
        assert "changes buffers of a BatchNorm1d from outside in place" in log.getvalue()


@ranks(2)
def test_a_network_that_a_forward_makes_and_drops_does_not_keep_it_whole() -> None:
    class Making(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(nn.BatchNorm1d(6)(x))

    model, x = Making(), torch.randn(6, 6)
    with sharding() as log:
        for _ in range(3):
            model(x).sum().backward()
    assert "from outside" not in log.getvalue()


class Sampling(Around):
    """Samples as a model of Pyro does, of which no name comes twice in a trace."""

    def forward(self, x: Tensor) -> Tensor:
        nodes = sys.modules["pyro.poutine.runtime"]._PYRO_STACK[0].trace.nodes
        if "z" in nodes:
            raise RuntimeError("Multiple sample sites named 'z'")
        nodes["z"] = torch.randn(len(x), 6)
        return self.body(x + nodes["z"])


@ranks(2)
def test_a_forward_that_pyro_records_runs_once() -> None:
    trace = SimpleNamespace(nodes={})
    runtime: Any = types.ModuleType("pyro.poutine.runtime")
    runtime._PYRO_STACK = [SimpleNamespace(trace=trace), SimpleNamespace()]
    model, x = Sampling(), torch.randn(6, 6)
    with mock.patch.dict(sys.modules, {runtime.__name__: runtime}), sharding() as log:
        for _ in range(3):
            trace.nodes.clear()
            model(x).sum().backward()
            assert len(trace.nodes["z"]) == 6
    if instep.rank == 0:
        assert "computes Sampling whole: Pyro records what its forward samples" in log.getvalue()


@ranks(2)
def test_what_does_not_depend_on_the_rows_is_kept_once_and_divided() -> None:
    def keep(module: Any, x: Tensor) -> None:
        module.kept["losses"].append(1.0)
        module.kept["meter"].update(0.5, 1)
        module.kept["seen"].add(x.shape[1])

    kept = {"losses": deque([0.0]), "meter": AverageMeter(), "seen": set()}
    model, x = Keeping(kept, keep), torch.randn(6, 6)
    with sharding():
        for _ in range(4):
            model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (4, 0)
    assert list(kept["losses"]) == [0.0] + [1.0] * 4  # type: ignore[call-overload]
    assert kept["meter"].state() == (2.0, 4, [0.0] + [0.5] * 4)  # type: ignore[attr-defined]
    assert kept["seen"] == {6}


class Noisy(Around):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.begin = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.begin:
            x = x + torch.randn(x.shape, generator=self.generator)
        return self.body(x)


@pytest.mark.parametrize("begin", [0, 6])
@ranks(2)
def test_a_generator_of_the_modules_own_draws_for_the_whole_batch(begin: int) -> None:
    torch.manual_seed(0)
    plain, model, x = Noisy(), Noisy(), torch.randn(6, 6)
    model.load_state_dict(plain.state_dict())
    plain.begin = model.begin = begin
    expected = [plain(x) for _ in range(8)]
    with sharding():
        outputs = [model(x) for _ in range(8)]
    assert all(map(torch.allclose, outputs, expected))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (8, 0)
    assert model.calls == 8


# ------------------------------------------------------------------ flags and numbers that change


class Options:
    def __init__(self) -> None:
        self.coupled: Any = False


class Coupling(Around):
    """Couples its rows where its options say so."""

    def __init__(self) -> None:
        super().__init__()
        self.coupled, self.options, self.table = False, Options(), {"coupled": False}
        self.epoch, self.steps = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        told = self.coupled or self.options.coupled or self.table["coupled"] or coupled
        return y - y.amax(0) if told or self.epoch == 2 or self.body.training is False else y


coupled = False


def set_global(model: Coupling, value: Any) -> None:
    global coupled
    coupled = value


FLAGS: dict[str, Callable[[Coupling, Any], None]] = {
    "attribute": lambda model, value: setattr(model, "coupled", value),
    "attribute of an object": lambda model, value: setattr(model.options, "coupled", value),
    "another object": lambda model, value: setattr(
        model, "options", SimpleNamespace(coupled=value)
    ),
    "dict": lambda model, value: model.table.update(coupled=value),
    "global variable": set_global,
    "mode of a part": lambda model, value: model.body.train(not value) and None,
    "number": lambda model, value: setattr(model, "epoch", 2 if value else 1),
}


@pytest.mark.parametrize("place", FLAGS)
@ranks(2)
def test_a_flag_that_changes_between_calls_is_compared_at_the_first_one(place: str) -> None:
    torch.manual_seed(0)
    model, x = Coupling(), torch.randn(6, 6)
    flags = [False] * 6 + [True] * 6
    expected, outputs = [], []
    for found in (expected, outputs):
        FLAGS[place](model, False)
        if found is expected:
            for flag in flags:
                FLAGS[place](model, flag)
                found.append(model(x))
            continue
        with sharding() as log:
            for flag in flags:
                FLAGS[place](model, flag)
                model.steps += 1
                found.append(model(x))
    FLAGS[place](model, False)
    assert all(map(torch.allclose, outputs, expected))
    assert (modules.call_counts.sharded - 5, modules.call_counts.whole) == (6, 6)
    if instep.rank == 0:
        assert log.getvalue().count("\n") == 1
        assert "Coupling whole" in log.getvalue()
        assert ": its output, a tensor of shape [" in log.getvalue()


@ranks(2)
def test_a_step_counter_does_not_hide_an_epoch() -> None:
    class Stepping(Around):
        def forward(self, x: Tensor, step: int, epoch: int) -> Tensor:
            y = self.body(x)
            return y - y.amax(0) if epoch == 9 else y

    model, x = Stepping(), torch.randn(6, 6)
    calls = [(step, step // 12) for step in range(120)]
    expected = [model(x, *each) for each in calls]
    with sharding():
        outputs = [model(x, *each) for each in calls]
    assert all(map(torch.allclose, outputs, expected))


@ranks(2)
def test_a_forward_that_counts_its_calls_is_compared_at_powers_of_two() -> None:
    class Warming(Around):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.body(x)
            return y - y.amax(0) if self.calls > 15 else y

    model, x = Warming(), torch.randn(6, 6)
    with sharding() as log:
        outputs = [model(x) for _ in range(16)]
    assert torch.equal(outputs[-1].amax(0), torch.zeros(3))
    assert model.calls == 16
    if instep.rank == 0:
        assert "(calls 11 to 15 were divided): what they returned may differ" in log.getvalue()


# ------------------------------------------------------------------ what cannot be undone


class Printing(Around):
    """Prints the shape of what it is given, in its first calls or always."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        if self.times > 0:
            self.times -= 1
            print("given", tuple(x.shape))
        return self.body(x)


@pytest.mark.parametrize(("times", "whole"), [(1.0, 1), (float("inf"), 5)])
@ranks(2)
def test_a_forward_prints_once_and_the_whole_batchs_shapes(times: float, whole: int) -> None:
    model, x, printed = Printing(times), torch.randn(6, 6), io.StringIO()
    with sharding() as log, contextlib.redirect_stdout(printed):
        for _ in range(5):
            model(x)
    assert printed.getvalue() == "given (6, 6)\n" * min(5, int(min(times, 9)))
    assert modules.call_counts.whole == whole
    if instep.rank == 0:
        assert ("whole: its forward prints." in log.getvalue()) == (whole == 5)


class TellingOfFewRows(Around):
    """Prints, in each call, where its batch is small."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 6:
            print("few rows")
        return self.body(x)


@ranks(2)
def test_a_forward_that_would_print_for_a_part_of_the_batch_alone_is_whole() -> None:
    model, x, printed = TellingOfFewRows(), torch.randn(6, 6), io.StringIO()
    with sharding() as log, contextlib.redirect_stdout(printed):
        for _ in range(5):
            model(x)
    assert printed.getvalue() == ""
    assert modules.call_counts.whole == 5
    if instep.rank == 0:
        assert "whole: its forward prints for a part of the batch." in log.getvalue()


@ranks(2)
def test_a_forward_that_appends_to_a_file_runs_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.txt")

        class Logging(Around):
            def forward(self, x: Tensor) -> Tensor:
                with path.open("a") as file:
                    file.write(f"{len(x)}\n")
                return self.body(x)

        model, x = Logging(), torch.randn(6, 6)
        with sharding() as log:
            for _ in range(5):
                model(x)
        assert path.read_text() == "6\n" * 5
    if instep.rank == 0:
        assert "Logging whole: its forward writes files (log.txt)." in log.getvalue()


@ranks(2)
def test_the_file_that_a_forward_writes_is_named_and_none_of_insteps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before, marker = pending_writes._marker.value, Path(folder, "rank.writing")

        class Saving(Around):
            def forward(self, x: Tensor) -> Tensor:
                path = Path(folder, "scores.pt")
                with pending_writes.track_write(str(path)):
                    torch.save(x, path)
                return self.body(x)

        pending_writes.set_marker(marker)
        try:
            with sharding() as log:
                model = Saving()
                for _ in range(3):
                    model(torch.randn(6, 6))
        finally:
            pending_writes._marker.value = before
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Saving whole: its forward writes files (scores.pt). "
            "[INS711]\n"
        )


@ranks(2)
def test_a_forward_that_logs_does_so_once() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("of a forward")
    logger.propagate = False
    logger.addHandler(handler)

    class Logging(Around):
        def forward(self, x: Tensor) -> Tensor:
            logger.warning("%d rows", len(x))
            return self.body(x)

    model, x = Logging(), torch.randn(6, 6)
    with sharding() as log:
        for _ in range(5):
            model(x)
    assert records == ["6 rows"] * 5
    if instep.rank == 0:
        assert "Logging whole: its forward logs." in log.getvalue()


@ranks(2)
def test_the_order_of_an_ordered_dict_changes_once() -> None:
    class Rotating(Around):
        def __init__(self) -> None:
            super().__init__()
            self.scales = OrderedDict([("a", 1.0), ("b", 2.0), ("c", 3.0)])

        def forward(self, x: Tensor) -> Tensor:
            name = next(iter(self.scales))
            self.scales.move_to_end(name)
            return self.body(x) * self.scales[name]

    model, x = Rotating(), torch.randn(6, 6)
    with sharding():
        for k in range(5):
            torch.testing.assert_close(model(x), model.body(x) * (1 + k % 3))
