"""Functions of torch that must know about a sharded call: batch statistics and checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.process.patching import Function
from instep.process.torch_compile import disable_compile
from instep.training import batchnorm
from instep.unedited.sharded_call.run.region import Region, current_region, is_inside

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def batch_norm(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """torch.nn.functional.batch_norm: inside of a sharded call, statistics of the whole batch."""
    function = _global_batch_norm if training and is_inside() else original
    output: Tensor = function(
        input, running_mean, running_var, weight, bias, training, *args, **kwargs
    )
    return output


@disable_compile
def _global_batch_norm(*args: Any, **kwargs: Any) -> Tensor:
    return batchnorm.batch_norm(*args, **kwargs)


def sync_batch_norm(original: Function, module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """torch.nn.SyncBatchNorm.forward: to the script there is one process, whose batch is whole."""
    output: Tensor = _BatchNorm.forward(module, x)
    return output


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


def checkpoint(
    original: Function,
    function: Function,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = _no_contexts,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint.checkpoint: backward recomputes inside of the same sharded call.

    There it is never reentrant: that would compute with the parameters themselves instead of their
    aliases. The numbers are the same.
    """
    region = current_region()
    if region is None:
        return original(
            function, *args, use_reentrant=use_reentrant, context_fn=context_fn, **kwargs
        )

    def contexts() -> Contexts:
        forward, recompute = context_fn()
        return forward, _RecomputeContext(region, recompute)

    return original(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _RecomputeContext:
    """A sharded call, entered again, and inside of it the script's own context."""

    def __init__(self, region: Region, inner: AbstractContextManager[Any]) -> None:
        self._region, self._inner = region, inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self._region.entered())
        self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
