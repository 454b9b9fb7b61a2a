"""Properties of a module that bear on its calls: hooks, state on a GPU, torch.compile."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy as is_uninitialized
from torch.nn.utils.parametrize import is_parametrized

from instep.process import is_installed
from instep.process.patching import ignored_warnings
from instep.process.torch_private.autograd import saved_tensors_hooks
from instep.process.torch_private.dispatch import dispatch_mode_stack, function_mode_stack
from instep.process.torch_private.modules import has_script_buffers, is_caching_weights
from instep.training.pytree import MAX_OBJECTS
from instep.unedited.objects.referents import referents, walk
from instep.unedited.objects.script_code import functions_of, names_in

_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
CALL_HOOKS = (*_FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
"""The tables of what a module's `__call__` does beside `forward`."""


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The module and its parts, each once, in the order of `modules()`, which may be overridden,
    and takes many times as long."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is not None and part not in found:
            found[part] = None
            waiting += reversed(part._modules.values())
    return list(found)


def is_named_in(kind: type[nn.Module], name: str) -> bool:
    """Whether a method of a module's class, but not nn.Module's, names this attribute."""
    known = _known_names.setdefault(kind, {})
    if name not in known:
        known[name] = any(
            name in names_in(method.__code__)
            for each in kind.__mro__
            if each is not nn.Module and issubclass(each, nn.Module)
            for method in functions_of(each)
        )
    return known[name]


_known_names: WeakKeyDictionary[type[nn.Module], dict[str, bool]] = WeakKeyDictionary()


def find_user_of_data(module: nn.Module) -> str:
    """The class of a part that names `.data`, by which a forward can change a parameter without a
    trace in autograd; empty if none does. torch's own do not count."""
    kinds = dict.fromkeys(map(type, parts_of(module)))
    own = (kind for kind in kinds if not kind.__module__.startswith("torch."))
    return next((kind.__name__ for kind in own if is_named_in(kind, "data")), "")


def find_hooks(module: nn.Module, parts: Iterable[nn.Module]) -> tuple[str, tuple[int, ...]]:
    """Say which part of the module has a hook that must see whole batches, "" if none; and the
    numbers of the others.

    The former are the script's. A library's forward hook may be there for the module's own sake;
    it must keep nothing of what it sees (see `library_hooks`).
    """
    for name in CALL_HOOKS:
        for hook in getattr(global_hooks, f"_global{name}").values():
            if owner := _owner(hook):
                return f"{owner} has a hook on all modules, which must see whole batches", ()
    others: list[int] = []
    for part in parts:
        for name in CALL_HOOKS:
            hooks = part.__dict__[name]
            for number, hook in hooks.items() if hooks else ():
                owner = _owner(hook)
                if owner and (owner == _SCRIPT or name not in _FORWARD_HOOKS):
                    name_of_part = _name_in(module, part)
                    return (
                        f"{owner} has a hook on its {name_of_part}, which must see whole batches",
                        (),
                    )
                if owner:
                    others.append(number)
    return "", tuple(others)


def find_observer() -> str:
    """Say what sees the operations or the saved tensors of a call that is made now; "" if nothing
    does. Function modes and hooks of torch's own are there for other things: a default device,
    tensors that are kept on the CPU."""
    for mode in reversed(dispatch_mode_stack()):
        return f"a {type(mode).__name__.lstrip('_')} sees its operations"
    for mode in reversed(function_mode_stack()):
        if type(mode).__module__.split(".")[0] not in _OURS:
            return f"a {type(mode).__name__.lstrip('_')} sees its calls of torch's functions"
    hooks = saved_tensors_hooks(False)
    is_script = hooks is not None and any(_owner(hook) == _SCRIPT for hook in hooks)
    return "the script's saved_tensors_hooks see its tensors" if is_script else ""


def _name_in(module: nn.Module, part: nn.Module) -> str:
    """The class of a part, and its path in the module."""
    paths = (path for path, each in module.named_modules() if each is part)
    path = next(paths, "")
    return f"{type(part).__name__} ({path})" if path else type(part).__name__


def library_hooks(module: nn.Module) -> dict[str, list[Any]]:
    """By library and layer: what the forward hooks could keep something in that libraries have on
    parts of a module."""
    return {
        f"{owner} on its {type(part).__name__}": _reachable(hook)[1]
        for part in module.modules()
        for name in _FORWARD_HOOKS
        for hook in part.__dict__[name].values()
        if (owner := _owner(hook))
    }


_SCRIPT = "the script"
_OURS = ("torch", "instep")


def _owner(hook: Any) -> str:
    """The library that has registered a hook; "" for torch's (normed weights have some) and
    instep's."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    if module.split(".")[0] in _OURS:
        return ""
    functions = _reachable(hook)[0]
    if not functions or not all(is_library(each.__code__.co_filename) for each in functions):
        return _SCRIPT
    while isinstance(hook, functools.partial):  # of Python's functools by its own __module__
        hook = hook.func
        module = getattr(hook, "__module__", None) or module
    return str(module.split(".")[0])


@cache
def is_library(file: str) -> bool:
    """Whether this file belongs to an installed package, or to a copy of one."""
    return is_installed(file) or "_vendor" in file.split("/")


_CODE = (types.FunctionType, types.MethodType, types.CellType, functools.partial)


def _reachable(hook: Any) -> tuple[list[types.FunctionType], list[Any]]:
    """The functions that a hook is made of, and what else these hold."""

    def follow(_: str, value: Any) -> Iterable[tuple[str, Any]]:
        is_entered = isinstance(value, (*_CODE, types.BuiltinMethodType, tuple, dict))
        return referents(value) if is_entered else ()

    call = type(hook).__call__
    parts = [hook, call] if isinstance(call, types.FunctionType) else [hook]
    found = [value for _, value in walk([("", part) for part in parts], follow, MAX_OBJECTS)]
    functions = [value for value in found if isinstance(value, types.FunctionType)]
    return functions, [value for value in found if not isinstance(value, _CODE)]


_MUCH_WORK = 2**25
"""Multiplications; a core does as many in a few milliseconds."""


def has_work(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether a single layer multiplies so much that it may pay to divide its call."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    weights = [p for p in layer._parameters.values() if p is not None and p.dim() > 1]
    return any(x.numel() // p.shape[1] * p.numel() >= _MUCH_WORK for p in weights)


def has_parameters(parts: Iterable[nn.Module]) -> bool:
    """Whether any of these has one: as `parameters()` of the module, which may be overridden."""
    return any(p is not None for part in parts for p in part._parameters.values())


def is_lazy(module: nn.Module) -> bool:
    """Whether some of its parameters or buffers get their shapes in the next call."""
    return any(
        tensor is not None and is_uninitialized(tensor)
        for part in module.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )


def find_gpu_state(parts: Iterable[nn.Module]) -> str:
    """The state on a GPU, of a module with these parts, that a trial would change and cannot set
    back; "" if there is none."""
    for part in parts:
        if _draws_in_cudnn(part):
            kind = type(part).__name__
            return f"cuDNN draws the dropout of its {kind} from a state that no trial can set back"
        if _runs_as_graphs(part):
            return "torch.compile runs it as CUDA graphs, whose next run overwrites its outputs"
    return ""


def find_scripted_state(parts: Iterable[nn.Module]) -> str:
    """The buffers of scripted modules that are not among these parts, but in their attributes,
    where torch.fx leaves them: a trial would change them. "" if there are none."""
    for part in parts:
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for name, value in part.__dict__.items():
            if has_script_buffers(value):
                return f"its attribute {name} is a scripted module with buffers that cannot be seen"
    return ""


def _draws_in_cudnn(part: nn.Module) -> bool:
    return (
        isinstance(part, nn.RNNBase)
        and bool(part.training and part.dropout and part.num_layers > 1)
        and cudnn.enabled
        and _is_on_gpu(part)
    )


def _runs_as_graphs(part: nn.Module) -> bool:
    """Whether it is compiled with the mode "reduce-overhead", or another of its kind."""
    compiled = part if "dynamo_ctx" in part.__dict__ else part._compiled_call_impl
    config = getattr(compiled, "get_compiler_config", lambda: None)()
    return bool((config or {}).get("triton.cudagraphs")) and _is_on_gpu(part)


def _is_on_gpu(part: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in nn.Module.parameters(part))


def caches_weights(parts: Iterable[nn.Module]) -> bool:
    """Whether the script may use a weight that these compute, with its gradient, outside of a call
    in which it was computed."""
    return torch.is_grad_enabled() and is_caching_weights() and any(map(is_parametrized, parts))


def computes_weight(part: nn.Module, name: str) -> bool:
    """Whether a hook of torch's computes this attribute anew in each forward, a normed weight."""
    return any(getattr(hook, "name", None) == name for hook in part._forward_pre_hooks.values())


def is_compiled(parts: Iterable[nn.Module]) -> bool:
    """Whether any of these is compiled."""
    # In every call, for every part: a list takes half the time of a generator.
    return bool(
        [part for part in parts if "dynamo_ctx" in part.__dict__ or part._compiled_call_impl]
    )


def ignored_grad_warnings() -> AbstractContextManager[None]:
    """Inside, torch.compile may look at the `.grad` of tensors that are no leaves, which warns.

    These are the aliases of parameters, and what one graph leaves to the next one.
    """
    return ignored_warnings("The .grad attribute of a Tensor that is not a")
