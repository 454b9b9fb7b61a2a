"""The region of a sharded call: the part of a forward in which each shard has its own rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import Tensor

from instep.distributed.communication.rank_local import rank_local
from instep.process.patching import replaced
from instep.process.torch_private.autograd import current_autograd_node, current_graph_task_id
from instep.training import forward_calls
from instep.training.autograd_graph import Root, next_nodes, tag, walk
from instep.training.blocks import Block
from instep.training.forward_calls import ForwardCall
from instep.unedited.sharded_call.plan.bound_call import Given
from instep.unedited.sharded_call.plan.division import Division, tensors_in
from instep.unedited.sharded_call.run.grad_sums import CallGradients, is_alias
from instep.unedited.sharded_call.run.mappings import is_region_input, reduce_in_region
from instep.unedited.sharded_call.run.random_numbers import (
    DrawRowDims,
    GlobalBatchDraws,
    intercepted_calls,
)
from instep.unedited.sharded_call.shards.batch_sums import RowSums, over_all_rows, replaced_sums
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.shard_threads import Joint, ShardThreads


@dataclass(eq=False)
class Region:
    """One sharded call, from its forward until its backward."""

    blocks: list[Block]
    """The rows of this rank's shards."""
    division: Division
    group: ShardGroup
    is_random: bool
    """Whether random numbers are drawn for the whole batch; slower by some microseconds for every
    operation."""
    row_dims: DrawRowDims
    sums: RowSums | None
    """Which sums and means of the forward's own go over the rows of all ranks; None: none does."""
    inputs: list[Tensor] = field(default_factory=list)
    """The arguments from the script that require a gradient."""
    gradients: CallGradients = field(default_factory=CallGradients)
    nodes: range = range(0)
    """The numbers of the autograd nodes of the forward of this rank's only shard."""
    threads: ShardThreads | None = None
    """The run of several shards, while it is under way."""
    new_parameter: str = ""
    """The name of a parameter that the forward has made."""
    trained_parameter: str = ""
    """The name of a parameter that was frozen, and is trained since the forward."""
    given: dict[int, Given] = field(default_factory=dict)
    """What the forward may have returned as it is, by the ids of what it got."""
    leaves: list[Any] = field(default_factory=list)
    """The arguments as the first of this rank's shards got them, where `given` is noted."""
    _outer: list[Region | None] = field(default_factory=list)
    """Each time that it is under way, the call around it."""

    @property
    def shard(self) -> int:
        """The number of the shard that this thread computes."""
        return self.group.own[0 if self.threads is None else self.threads.number]

    @property
    def block(self) -> Block:
        """The rows of the shard that this thread computes."""
        return self.blocks[0 if self.threads is None else self.threads.number]

    def __enter__(self) -> None:
        """This call is under way."""
        global _current, _inside
        forward_calls.push(ForwardCall.of(self.blocks[0], statistics="global"))
        self._outer.append(_current)
        _current, _inside = self, True

    def __exit__(self, *_: object) -> None:
        global _current, _inside
        _current = self._outer.pop()
        _inside = _current is not None
        forward_calls.pop()

    def entered_by_shard(self) -> AbstractContextManager[None]:
        """Inside, on the thread of a shard, random numbers are those of the whole batch, and sums,
        too, where that is asked for."""
        if self.is_random or self.sums is not None:
            return self._replaced_operations()
        return rank_local()

    @contextmanager
    def _replaced_operations(self) -> Iterator[None]:
        draws = None
        if self.is_random:
            of_batch = GlobalBatchDraws(
                self.blocks, self.division.batch_dim, self.group, self.row_dims, self.meet
            )
            draws = intercepted_calls(of_batch.run)
        sums = self.sums and replaced_sums(over_all_rows(self.sum, self.sums))
        with rank_local(), draws or nullcontext(), sums or nullcontext():
            yield

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """Inside, backward recomputes a part of the call's forward."""
        with self, self.entered_by_shard():
            yield

    def sum(self, part: Tensor) -> Tensor:
        """The sum over shards of each one's tensor; so is its gradient. Collective."""
        total: Tensor = self.meet(part, lambda parts: reduce_in_region(parts, self.group))
        return total

    def meet(self, value: Any, joint: Joint, place: Hashable = None) -> Any:
        """This shard's result of `joint`, which takes a value of each of this rank's shards; with a
        place, of those that come there."""
        return joint([value])[0] if self.threads is None else self.threads.meet(value, joint, place)


@dataclass
class CallState:
    """How deep the script is in calls of modules."""

    inside: bool = False
    """Whether a call is under way whose parts run as they are."""
    whole_depth: int = 0
    """How many calls are under way that run whole, and whose parts may be sharded."""
    is_checkpointed: bool = False
    """Whether what runs now must save the same tensors when backward computes it again."""
    saves_attributes: bool = False
    """Whether rank 0 alone saves the attributes of modules now and then, for which it must have
    all rows."""
    compares_gradients: bool = False
    """Whether the backward under way is one of a comparison, which leaves `.grad` as it is."""

    def calling(self) -> AbstractContextManager[None]:
        """Inside, parts run as they are."""
        return replaced((self, "inside", True))

    def calling_parts(self) -> AbstractContextManager[None]:
        """Inside of a call that runs whole, its parts may be sharded."""
        return replaced((self, "inside", False), (self, "whole_depth", self.whole_depth + 1))

    def comparing_gradients(self) -> AbstractContextManager[None]:
        """Inside, a backward that begins another one, which adds to `.grad`, is refused."""
        return replaced((self, "compares_gradients", True))

    def checkpointing(self) -> AbstractContextManager[None]:
        """Inside, what runs must save the same tensors when it runs again."""
        return replaced((self, "is_checkpointed", True))


call_state = CallState()
_current: Region | None = None
_inside = False  # what torch.compile can put a guard on


def current_region() -> Region | None:
    """The sharded call under way."""
    return _current


def is_inside() -> bool:
    """Whether a sharded call is under way."""
    return _inside


_TAG = "instep.region"
_tagged: WeakSet[Region] = WeakSet()


def tag_outputs(outputs: Iterable[Any], region: Region) -> None:
    """Write down in the autograd graph that these outputs come from this sharded call."""
    tensors = [tensor for output in outputs for tensor in tensors_in(output)]
    tag(tensors, _TAG, region)
    if region.gradients.have_hooks:
        region.gradients.note_order(tensors)
    _tagged.add(region)


def has_regions() -> bool:
    """Whether there is the graph of any sharded call still."""
    return len(_tagged) > 0


def is_in_backward() -> bool:
    """Whether backward is in a sharded call, at a node of one's forward."""
    if current_graph_task_id() == -1 or (node := current_autograd_node()) is None:
        return False
    number = node._sequence_nr()
    return any(number in region.nodes for region in _tagged)


def find_regions(roots: Iterable[Root]) -> list[Region]:
    """The sharded calls that these tensors were computed from, the last ones first.

    Walks the graph outside of the calls: from the roots to tagged outputs, and on from the inputs
    of their calls.
    """
    found: dict[Region, None] = {}

    def visit(node: Any) -> Iterable[Any]:
        region = node.metadata.get(_TAG)
        if region is None:
            return next_nodes(node)
        if region in found:
            return ()
        found[region] = None
        return [x.grad_fn for x in region.inputs]

    walk(roots, visit)
    return list(found)


def find_whole_leaves(roots: Iterable[Root]) -> list[Tensor]:
    """The leaves whose gradients every rank computes whole in a backward from these roots."""
    found: list[Tensor] = []

    def visit(node: Any) -> Iterable[Any]:
        if (region := node.metadata.get(_TAG)) is not None:
            return [x.grad_fn for x in region.inputs]
        if hasattr(node, "variable"):
            found.append(node.variable)
        return () if is_alias(node) else next_nodes(node)

    walk(roots, visit)
    return found


def find_leaves(
    outputs: Iterable[Any],
    start: int,
    inputs: Iterable[Any] = (),
    ends_at: Callable[[Any], bool] = lambda _: False,
) -> list[Tensor] | None:
    """The tensors that these were computed from, without `inputs` and those of a sharded call;
    None if something is among them that was computed before `start`. What lies behind older nodes
    that it `ends_at` is left out, too."""
    found: dict[int, Tensor] | None = {}
    ends = {x.grad_fn for x in inputs if isinstance(x, Tensor)}

    def visit(node: Any) -> Iterable[Any]:
        nonlocal found
        if is_alias(node) or is_region_input(node) or node in ends:
            return ()
        if found is not None and hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        elif node._sequence_nr() < start:
            if ends_at(node):
                return ()
            found = None
        return () if found is None else next_nodes(node)

    walk((tensor for out in outputs for tensor in tensors_in(out)), visit)
    return None if found is None else list(found.values())
