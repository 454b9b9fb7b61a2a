"""The import hook for `import horovod.torch` and `from apex import amp` if neither is installed.

An installed package comes first: the hook finds a name only if no other finder has its package.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

IMPLEMENTATIONS = {
    "apex": "instep.compat.apex",
    "horovod.torch.mpi_ops": "instep.compat.horovod",
    "horovod.torch": "instep.compat.horovod",
    "horovod.common.elastic": "instep.compat.horovod.elastic",
    "horovod.common.exceptions": "instep.compat.horovod.errors",
    "horovod.common.process_sets": "instep.compat.horovod.basics",
    "horovod.common.util": "instep.compat.horovod.util",
    "horovod.data": "instep.compat.horovod.data",
    "horovod.runner.common.util.codec": "instep.compat.horovod.util",
    "horovod.runner.common.util.env": "instep.compat.horovod.util",
    "horovod.runner": "instep.launch.horovod_runner",
    "jittor": "instep.compat.jittor",
}
"""The package of instep that is imported under each name, submodules included. The first name
that fits counts; the parents of these names become empty packages."""

_ATTRIBUTES = {"horovod": (("__version__", "run"), "instep.launch.horovod_runner")}
"""Of an empty package: names in it, and the package of instep that has them."""

_OTHER_FRAMEWORK = "horovod.torch, for models of PyTorch; instep has no other framework"
_REPLACED = {
    "apex.RNN": "torch.nn.LSTM, GRU and RNN, which amp casts",
    "apex.amp.lists": "amp.register_half_function, register_float_function, "
    "register_promote_function",
    "apex.amp.opt": "amp.initialize and amp.scale_loss",
    "apex.amp.scaler": "amp._amp_state.loss_scalers, or torch.amp.GradScaler",
    "apex.amp.wrap": "amp.half_function, float_function, promote_function",
    "apex.contrib.bottleneck": "torchvision.models.resnet.Bottleneck",
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.conv_bias_relu": "torch.nn.Conv2d and torch.nn.ReLU, in torch.compile",
    "apex.contrib.cudnn_gbn": "torch.nn.BatchNorm2d, which instep.replicate joins over the ranks",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d, which instep.replicate joins over the ranks",
    "apex.contrib.index_mul_2d": "a[index] * b",
    "apex.contrib.layer_norm": "torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool",
    "apex.contrib.openfold_triton": "torch.nn.functional.scaled_dot_product_attention and "
    "torch.nn.LayerNorm, in torch.compile",
    "apex.contrib.optimizers": "instep.shard(optimizer), which divides its state",
    "apex.contrib.sparsity": "torch.nn.utils.prune",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.CrossEntropyLoss(label_smoothing=...)",
    "apex.fused_dense": "torch.nn.Linear and torch.nn.GELU",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "apex.multi_tensor_apply": "torch._foreach_add_ and its relatives",
    "apex.pyprof": "torch.profiler.profile",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron-LM's own package megatron.core",
    "horovod.keras": _OTHER_FRAMEWORK,
    "horovod.mxnet": _OTHER_FRAMEWORK,
    "horovod.ray": "instep.spawn(function, args, nprocs=4, ray={}) on a Ray cluster",
    "horovod.runner.common.util.hosts": "the command `instep horovodrun -H host:4,...`",
    "horovod.runner.elastic": "the command `instep horovodrun --host-discovery-script FILE`",
    "horovod.runner.gloo_run": "the command `instep horovodrun`, or horovod.run",
    "horovod.runner.launch": "the command `instep horovodrun`, or horovod.run",
    "horovod.runner.mpi_run": "the command `instep horovodrun`, or horovod.run",
    "horovod.spark": "instep.spawn, or the command `instep horovodrun` on each host",
    "horovod.tensorflow": _OTHER_FRAMEWORK,
    "jittor.dataset.cifar": "torchvision.datasets.CIFAR10 and CIFAR100",
    "jittor.dataset.mnist": "torchvision.datasets.MNIST",
    "jittor.dataset.voc": "torchvision.datasets.VOCSegmentation",
    "jittor.distributions": "torch.distributions",
    "jittor.init": "torch.nn.init",
    "jittor.lr_scheduler": "torch.optim.lr_scheduler",
    "jittor.models": "torchvision.models",
    "jittor.nn": "torch.nn, and jittor.optim for the optimizers",
    "jittor.transform": "torchvision.transforms",
}
"""What takes the place of modules that are not there."""
_PACKAGES = {name.partition(".")[0] for name in (*IMPLEMENTATIONS, *_REPLACED, "instep")}
"""Those in which the hook finds something: the imports of all others pass through it."""


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
        if name.partition(".")[0] not in _PACKAGES:
            return None
        theirs = _their_name(name)
        package = theirs.partition(".")[0]
        if theirs in _REPLACED and not self._is_installed(package):
            # The name is the package's: `from a import b` hides an error about a.b itself.
            raise ModuleNotFoundError(
                f"{theirs} needs an installed {package.title()}. "
                f"In its place: {_REPLACED[theirs]}.",
                name=package,
            )
        package = name.partition(".")[0]
        ours = _implementation(name)
        is_parent = any(known.startswith(f"{name}.") for known in (*IMPLEMENTATIONS, *_REPLACED))
        if not (ours or is_parent) or self._is_installed(package):
            return None
        if ours is None or not _exists(ours):
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


def _their_name(name: str) -> str:
    """`jittor.nn` for `instep.compat.jittor.nn`, which `from jittor import nn` asks for."""
    for known, ours in IMPLEMENTATIONS.items():
        if name.startswith(f"{ours}."):
            return known + name.removeprefix(ours)
    return name


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


class _AliasLoader(Loader):
    """Makes an existing module importable under another name."""

    def __init__(self, implementation: str) -> None:
        self._implementation = implementation

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._implementation)


class _EmptyLoader(Loader):
    """Makes an empty package, which imports the names of `_ATTRIBUTES` at their first use."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _ATTRIBUTES:
            names, home = _ATTRIBUTES[module.__name__]
            vars(module)["__getattr__"] = partial(_attribute, module.__name__, names, home)


def _attribute(package: str, names: Collection[str], home: str, asked: str) -> Any:
    if asked not in names:
        raise AttributeError(f"module {package!r} has no attribute {asked!r}")
    return getattr(import_module(home), asked)
