"""Jittor's names for tensors and modules, as far as its tests of MPI use them, by PyTorch.

What is distributed in these tests is instep's; a tensor is PyTorch's, which has other names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Module(torch.nn.Module):
    """Its classes call no `super().__init__`, and define `execute`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Module:
        """Initialized as a module of PyTorch."""
        module = super().__new__(cls)
        torch.nn.Module.__init__(module)
        return module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def forward(self, *args: Any) -> Any:
        """What `execute` computes."""
        return self.execute(*args)


def batch_norm(features: int, sync: bool = True) -> torch.nn.Module:
    """Batch statistics of all ranks, or of this one."""
    import instep

    module = torch.nn.BatchNorm2d(features)
    return instep.replicate(module) if sync else module


def grad(y: torch.Tensor, x: Any) -> Any:
    """Of the sum of y; one for each tensor of x."""
    given = x if isinstance(x, torch.Tensor) else list(x)
    found = torch.autograd.grad(y.sum(), given)
    return found[0] if isinstance(x, torch.Tensor) else found


def constant(shape: Sequence[int], dtype: str, value: float) -> torch.nn.Parameter:
    """A parameter of equal numbers."""
    return torch.nn.Parameter(torch.full(shape, value, dtype=getattr(torch, dtype)))


def broadcast(small: torch.Tensor, like: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """`small` in the shape of `like`, along `dims` the same."""
    for dim in sorted(dims):
        small = small.unsqueeze(dim)
    return small.expand_as(like)


def install() -> None:
    """Add them to the module that `import jittor` finds, and to torch.Tensor; in this process."""
    import jittor

    jittor.add_methods()
    jittor.random = lambda shape: torch.rand(shape, requires_grad=True)
    jittor.zeros = lambda shape: torch.zeros(shape, requires_grad=True)
    jittor.array, jittor.sqrt, jittor.grad = torch.tensor, torch.sqrt, grad
    jittor.mean = lambda x, dims, keepdims: x.mean(dims, keepdim=bool(keepdims))
    jittor.seed, jittor.has_cuda = torch.manual_seed, False
    jittor.flag_scope = lambda **_: lambda function: function
    jittor.compile_extern.nccl_ops = None
    jittor.nn = SimpleNamespace(Module=Module, BatchNorm=batch_norm)
    jittor.init = SimpleNamespace(constant=constant)
    tensor: Any = torch.Tensor
    tensor.stop_grad, tensor.sync = torch.Tensor.detach, lambda _: None
    tensor.update = lambda to, value: to.copy_(value.detach())
    tensor.broadcast = broadcast
    for name in ("jittor.test", "jittor.test.test_mpi"):  # it starts mpirun where there is none
        sys.modules[name] = ModuleType(name)
    sys.modules[name].run_mpi_test = lambda *_: None  # type: ignore[attr-defined]
