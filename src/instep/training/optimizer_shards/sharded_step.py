"""`instep.shard(optimizer)`: the optimizer's step, and how its whole state is had and loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from instep.distributed.communication.transport import Transport, get_transport
from instep.distributed.flight_record.recorder import recorder
from instep.errors import TrainingError
from instep.process.process_value import ProcessValue
from instep.training.buckets.reducer import partial_sums, reducer_of
from instep.training.drift.optimizers import parameters_of
from instep.training.drift.step_gradients import GradientCheck
from instep.training.errors import CannotShardError, ShardedTwiceError
from instep.training.optimizer_shards.bucket import Divide, State, StepBucket
from instep.training.optimizer_shards.layout import (
    check_dense,
    divide_elements,
    divide_parameters,
)

_BY_ELEMENT = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.Rprop),
}
_BY_PARAMETER = {getattr(optim, name) for name in ("Adafactor", "Muon") if hasattr(optim, name)}
_DIVISIONS: dict[object, Divide] = {"element": divide_elements, "parameter": divide_parameters}
_FUSED = {optim.Adam, optim.AdamW}
"""Those whose fused kernel on a CPU is several times as fast as PyTorch's default."""
_FUSED_DTYPES = {torch.float32, torch.float64}
"""With fewer bits the loops round after each operation, and the kernels once."""
_OF_LOCAL_STEP = ("params", "fused")
"""Options that a group of slices may have otherwise than the script's group."""
PRECISION = "_instep_steps"
"""The attribute of an optimizer that `instep.precision` has prepared."""
_SHARDS = "_instep_shards"
_KNOWN_TO_SCHEDULERS = "_wrapped_by_lr_sched"
"""The attribute of a step that sets the optimizer's `_opt_called`, by which a scheduler sees that
the optimizer has stepped."""
_CALLS_HOOKS = "hooked"
"""Likewise of a step that calls the optimizer's hooks: else load_state_dict wraps it once more."""
_OF_EACH = {"state", "param_groups", _SHARDS}
"""The attributes that the script's optimizer and that of the slices do not have in common."""


def shard_optimizer(optimizer: Optimizer) -> None:
    """Divide the steps of `optimizer` between the ranks from now on; see `instep.shard`.

    Raises CannotShardError, ShardedTwiceError.
    """
    if hasattr(optimizer, _SHARDS):
        raise ShardedTwiceError(
            "the steps of this optimizer are already divided. Call instep.shard(optimizer) once."
        )
    divide = _division_of(optimizer)
    transport = get_transport()
    shards = _ShardedSteps(optimizer, divide, transport) if transport.size > 1 else None
    setattr(optimizer, _SHARDS, shards)
    if shards is not None:
        for name in _METHODS:  # a scheduler may have put its own in front of the class's
            vars(optimizer).pop(name, None)
        kind: Any = type(optimizer)
        optimizer.__class__ = _divided_class(kind)
    else:  # as those of several ranks: state dicts share no memory with the optimizer
        optimizer.register_state_dict_post_hook(_copied)
        optimizer.register_load_state_dict_pre_hook(_copied)


_shares_memory = ProcessValue(False)


def sharing_memory() -> AbstractContextManager[bool]:
    """Inside, the state dict of an optimizer that is divided in a world of one is not copied: for
    one that copies it itself, or keeps none that it has loaded."""
    return _shares_memory.set_to(True)


def _copied(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict if _shares_memory.value else copy.deepcopy(state_dict)


def _division_of(optimizer: Optimizer) -> Divide:
    kind = type(optimizer)
    known = "element" if kind in _BY_ELEMENT else "parameter" if kind in _BY_PARAMETER else None
    by = getattr(kind, "updates_by", known)
    if by not in _DIVISIONS:
        name = kind.__name__
        raise CannotShardError(
            f"instep.shard does not know {name}. If it updates each element of a parameter from "
            "that element's gradient and state alone, say so by a class attribute: "
            f'`updates_by = "element"` in {name}; if from that parameter\'s alone, '
            '`updates_by = "parameter"`. Otherwise leave it undivided: it then runs whole on '
            "every rank."
        )
    if hasattr(optimizer, PRECISION):
        raise CannotShardError(
            "this optimizer has master weights or a loss scale of instep.precision, with which "
            "instep.shard(optimizer) does not work yet. Leave it undivided."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CannotShardError(
            f"{kind.__name__} with differentiable=True cannot be divided: its step is part of a "
            "graph. Leave this optimizer undivided."
        )
    for group in optimizer.param_groups:
        _check_once(group)
    return _DIVISIONS[by]


def _check_summed(parameters: Sequence[Tensor]) -> None:
    unsummed = {id(each) for each in partial_sums() if each.grad is not None}
    if any(id(each) in unsummed for each in parameters):
        raise TrainingError(
            "a divided optimizer steps with gradients that were not summed over the ranks: no "
            "backward outside of instep.no_sync has followed, or the loop of instep.accumulate was "
            "left before its last batch. Step after a backward that sums, or call "
            "optimizer.zero_grad() first."
        )


def _check_once(group: dict[str, Any]) -> None:
    if len({*group["params"]}) < len(group["params"]):
        raise CannotShardError(
            "a parameter is in a group of this optimizer twice, so that each step would update it "
            "twice. Give each parameter to the optimizer once."
        )


class DividedState(defaultdict[Tensor, Any]):
    """The `state` of an optimizer whose steps are divided: no parameter has its own here."""

    def __missing__(self, parameter: Tensor) -> State:
        raise CannotShardError(
            "optimizer.state has no entry for a parameter since instep.shard(optimizer): each rank "
            "keeps a part of it. optimizer.state_dict(), on all ranks, has the whole state."
        )

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Raise CannotShardError: the script would take the default for the parameter's state."""
        return self.__missing__(parameter)

    def __setitem__(self, parameter: Tensor, state: State) -> None:
        self.__missing__(parameter)


class _ShardedSteps:
    """An optimizer whose class's step runs on this rank's parts only.

    `local` is an optimizer of the same class whose parameters are the slices; it has the state.
    The script's optimizer keeps its parameters, hyper-parameters and hooks, and no state. It has
    this object, which does not refer to it: both go when the script lets go of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, divide: Divide, transport: Transport) -> None:
        self._kind = type(optimizer)
        self._divide = divide
        self._transport = transport
        self._groups: list[list[StepBucket]] = []
        self._known: set[Tensor] = set()
        """The parameters in buckets."""
        self._check_of_gradients = GradientCheck()
        self._local = object.__new__(self._kind)
        self._local.__dict__.update(vars(optimizer))
        self._local.state = defaultdict(dict)
        step = self._kind.step
        self._step_of_class: Callable[..., Any] = getattr(step, "__wrapped__", step)
        """Without the hooks on steps, which are called for the script's optimizer."""
        self._take_state(optimizer)

    @property
    def local_state(self) -> dict[Tensor, State]:
        """The state of this rank's slices."""
        state: dict[Tensor, State] = self._local.state
        return state

    @torch.no_grad()
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._divide_new(optimizer, lambda parameter: parameter.grad is not None)
        parameters = parameters_of(optimizer)
        _check_summed(parameters)
        gradients = [each.grad for each in parameters]
        self._check_of_gradients.begin_step(parameters, gradients, {}, self._transport)
        buckets = [bucket for group in self._groups for bucket in group]
        for bucket in buckets:
            bucket.prepare(self.local_state)
        local_groups = [
            self._local_group(options, [each for bucket in group for each in bucket.slices])
            for options, group in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        # The script, a GradScaler or the class's own step may have set any attribute.
        own = {"state": self.local_state, "param_groups": local_groups}
        self._local.__dict__ = _common_attributes(optimizer) | own
        self._step_of_class(self._local)
        vars(optimizer).update(_common_attributes(self._local))
        for options, local in zip(optimizer.param_groups, self._local.param_groups, strict=True):
            options.update({name: local[name] for name in local if name not in _OF_LOCAL_STEP})
        with recorder.with_detail("step of a divided optimizer"):
            for bucket in buckets:
                bucket.gather()
        vars(optimizer)["_opt_called"] = True
        return loss

    def _local_group(self, options: dict[str, Any], slices: list[Tensor]) -> dict[str, Any]:
        """The options of a group for this rank's slices.

        Where the script leaves the kernel to PyTorch, which takes loops on a CPU, it is the fused
        one.
        """
        group = {**options, "params": slices}
        is_open = options.get("fused", False) is None and options["foreach"] is None
        if is_open and self._kind in _FUSED and all(map(_has_fused_kernel, slices)):
            group["fused"] = True
        return group

    def _divide_new(self, optimizer: Optimizer, is_due: Callable[[Tensor], bool]) -> None:
        """Divide the parameters that are due and not divided yet.

        A parameter is due when it has its first gradient: then the ranks' parts are equal, even
        if some layers are frozen.
        """
        groups = optimizer.param_groups
        self._groups += [[] for _ in groups[len(self._groups) :]]
        for buckets, group in zip(self._groups, groups, strict=True):
            if not {p for bucket in buckets for p in bucket.parameters} <= {*group["params"]}:
                raise CannotShardError(
                    "a parameter was taken out of a group of a divided optimizer. Make a new "
                    "optimizer for the new parameters."
                )
            _check_once(group)
            alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter not in self._known and is_due(parameter):
                    self._check(parameter)
                    alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
                    self._known.add(parameter)
            for parameters in alike.values():
                buckets.append(StepBucket(parameters, self._divide, self._transport))

    @staticmethod
    def _check(parameter: Tensor) -> None:
        if parameter not in reducer_of:
            raise CannotShardError(
                f"a parameter of shape {tuple(parameter.shape)} is in no replicated model, so the "
                "ranks' gradients of it differ. Call instep.replicate(model) before the first step."
            )
        check_dense(parameter)

    def _take_state(self, optimizer: Optimizer) -> None:
        """Keep this rank's parts of the state that the script's optimizer has."""
        full = optimizer.state
        self._divide_new(optimizer, lambda parameter: parameter in full)
        self._local.state = defaultdict(dict)
        for group in self._groups:
            for bucket in group:
                bucket.update_slices(self.local_state)
                self.local_state.update(bucket.own_state(full))
        optimizer.state = DividedState()

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of the undivided optimizer, whole on every rank. Collective."""
        full: dict[Tensor, State] = {}
        with recorder.with_detail("state_dict of a divided optimizer"):
            for bucket in chain.from_iterable(self._groups):
                full.update(bucket.full_state(self.local_state))
        optimizer.state = defaultdict(dict, _in_order(full, optimizer.param_groups))
        try:
            return self._kind.state_dict(optimizer)
        finally:
            optimizer.state = DividedState()

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an undivided optimizer, the same on every rank."""
        self._kind.load_state_dict(optimizer, state_dict)
        self._local.state = defaultdict(dict)
        self._take_state(optimizer)


_METHODS = ("step", "state_dict", "load_state_dict")
"""Those of an optimizer in whose place are the ones of `_ShardedSteps`."""


@cache
def _divided_class(kind: Any) -> Any:
    """A class of this name for optimizers whose steps are divided. Methods that were attributes of
    an optimizer would keep it until the next garbage collection."""
    methods: dict[str, Any] = {name: _method(name) for name in _METHODS}
    methods["step"] = Optimizer.profile_hook_step(methods["step"])
    for mark in (_KNOWN_TO_SCHEDULERS, _CALLS_HOOKS):
        setattr(methods["step"], mark, True)
    names = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}

    def reduce(self: Optimizer, _protocol: int) -> tuple[Any, ...]:
        return object.__new__, (kind,), self.__getstate__()

    methods["__reduce_ex__"] = reduce  # of a copy, and for pickle, which looks up the class
    return type(kind.__name__, (kind,), methods | names)


def _method(name: str) -> Callable[..., Any]:
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, _SHARDS), name)(self, *args, **kwargs)

    call.__name__ = name
    return call


def _common_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_EACH}


def _has_fused_kernel(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype in _FUSED_DTYPES


def _in_order(full: dict[Tensor, State], groups: Sequence[dict[str, Any]]) -> dict[Tensor, State]:
    """States in the order of the parameters, in which the undivided optimizer makes them."""
    return {each: full[each] for group in groups for each in group["params"] if each in full}
