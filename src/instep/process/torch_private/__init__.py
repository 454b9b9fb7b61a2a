"""PyTorch's private names: those that instep uses stand here, by subject, and nowhere else in it.

A comment says what a name is for. Each is needed in all versions of `versions.TRIED`, where nothing
else is said. If a newer PyTorch lacks a name, this package is the one to change; `scripts/compat`
runs the tests with other versions. An import of any of its modules looks up all names, before
instep has patched a function.
"""

from instep.process.torch_private import (
    autograd,
    compiler,
    devices,
    dispatch,
    distributed,
    loaders,
    modules,
    tensors,
    versions,
)

__all__ = [
    "autograd",
    "compiler",
    "devices",
    "dispatch",
    "distributed",
    "loaders",
    "modules",
    "tensors",
    "versions",
]
