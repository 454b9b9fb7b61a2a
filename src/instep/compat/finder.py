"""The import hook for `import horovod.torch` and `from apex import amp` if neither is installed.

An installed package comes first: the hook finds a name only if no other finder has its package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

IMPLEMENTATIONS = {
    "apex": "instep.compat.apex",
    "horovod.torch.mpi_ops": "instep.compat.horovod",
    "horovod.torch": "instep.compat.horovod",
    "horovod.common.elastic": "instep.compat.horovod.elastic.state",
    "horovod.common.exceptions": "instep.compat.horovod.errors",
    "horovod.common.process_sets": "instep.compat.horovod.basics",
}
"""The package of instep that is imported under each name, submodules included. The first name
that fits counts; the parents of these names become empty packages."""

_REPLACED = {
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d, which instep.replicate joins over the ranks",
    "apex.contrib.layer_norm": "torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.optimizers": "instep.shard(optimizer), which divides its state",
    "apex.contrib.sparsity": "torch.nn.utils.prune",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.CrossEntropyLoss(label_smoothing=...)",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "apex.multi_tensor_apply": "torch._foreach_add_ and its relatives",
    "apex.transformer": "Megatron-LM's own package megatron.core",
}
"""What takes the place of modules that are not there."""


def install() -> None:
    """Install the import hook in this process. Imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First in the list: otherwise a submodule of an alias would be found by its file, and be
        # loaded a second time.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _REPLACED and not self._is_installed(name.partition(".")[0]):
            raise ModuleNotFoundError(
                f"{name} needs an installed Apex. In its place: {_REPLACED[name]}.", name=name
            )
        ours = _implementation(name)
        is_parent = any(known.startswith(f"{name}.") for known in (*IMPLEMENTATIONS, *_REPLACED))
        if not (ours or is_parent) or self._is_installed(name.partition(".")[0]):
            return None
        if ours is None or find_spec(ours) is None:
            return ModuleSpec(name, _EmptyLoader(), is_package=True) if is_parent else None
        return ModuleSpec(name, _AliasLoader(ours), is_package=True)

    def _is_installed(self, package: str) -> bool:
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(package, None) for finder in others)
        # A mere folder has no origin: Horovod's source tree, beside the script, hid these names.
        return any(spec is not None and spec.origin is not None for spec in found)


def _implementation(name: str) -> str | None:
    for known, ours in IMPLEMENTATIONS.items():
        if name == known or name.startswith(f"{known}."):
            return ours + name.removeprefix(known)
    return None


class _AliasLoader(Loader):
    """Makes an existing module importable under another name."""

    def __init__(self, implementation: str) -> None:
        self._implementation = implementation

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._implementation)


class _EmptyLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        return None
