"""Every function that is replaced in an unedited script on several ranks, and why.

The packages that own the replacements list them; this module joins the lists and installs them.
In a world of one only LOADER_PATCH and SEED_PATCHES are installed, so that random numbers do not
depend on the number of ranks.
"""

from __future__ import annotations

import signal

import torch
from torch import nn

from instep.distributed.watchdog.signals import script_handlers
from instep.process import settings
from instep.process.patching import Patch, PatchHandle, patches
from instep.process.torch_private.autograd import HOOKED_NODE
from instep.process.torch_private.loaders import loader_signals
from instep.process.torch_private.modules import VF
from instep.unedited.data.loader_patch import LOADER_PATCH
from instep.unedited.data.workers import worker_failures
from instep.unedited.devices import DEVICE_PATCHES
from instep.unedited.files import os_functions
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.patches import FILE_PATCHES
from instep.unedited.one_process_api import ONE_PROCESS_PATCHES
from instep.unedited.opt_out import OPT_OUT_PATCHES
from instep.unedited.optimizer_steps import fused_kernels
from instep.unedited.processes.patches import PROCESS_PATCHES
from instep.unedited.seeds import SEED_PATCHES
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run import backward, losses, overrides
from instep.unedited.sharded_call.shards import node_hooks
from instep.unedited.std_streams import STREAM_PATCHES, WARNING_PATCHES

SIGNAL_PATCHES = patches(
    "a signal takes effect at the same point of the script on every rank",
    (signal, "signal", script_handlers.set_handler),
    (signal, "getsignal", script_handlers.get_handler),
    (signal, "raise_signal", script_handlers.raise_signal),
)

WORKER_PATCHES = patches(
    "the error of a worker that was killed would reach its rank anywhere in the script",
    (loader_signals, "_error_if_any_worker_fails", worker_failures.check_workers),
)

SHARDED_CALL_PATCHES: tuple[Patch, ...] = (
    *patches(
        "the outermost call of a module runs on this rank's rows",
        (nn.Module, "__call__", modules.module_call),
        factory=True,
    ),
    *patches(
        "gradients are summed over ranks while backward runs",
        (torch.autograd, "backward", backward.backward),
    ),
    *patches(
        "a hook on the node of a parameter must see the sum over ranks",
        (*HOOKED_NODE, node_hooks.note_hook),
    ),
    *patches(
        "the rows of an output, of which it takes a gradient, are on all ranks",
        (torch.autograd, "grad", backward.grad),
    ),
    *patches(
        "in a sharded call the batch statistics are those of the whole batch",
        (nn.functional, "batch_norm", overrides.batch_norm),
        (nn.functional, "instance_norm", overrides.instance_norm),
        compile="break",
    ),
    *patches(
        "in a sharded call sequences are as long as the longest of the whole batch",
        (VF, "_pad_packed_sequence", overrides.pad_packed_sequence),
        compile="break",
    ),
    *patches(
        "the statistics are summed over ranks already",
        (nn.SyncBatchNorm, "forward", overrides.sync_batch_norm),
    ),
    *patches(
        "backward would recompute the forward outside of the sharded call",
        ("torch.utils.checkpoint", "checkpoint", overrides.checkpoint),
    ),
    *patches(
        "in a sharded call a loss is that of the whole batch",
        (nn.functional, " ".join(losses.NAMES), losses.loss),
        compile="break",
    ),
)

OPTIMIZER_PATCHES: tuple[Patch, ...] = (
    *patches(
        "PyTorch's loops over tensors go through memory more often than its fused kernels",
        ("torch.optim.adam", "adam", fused_kernels.adam),
        ("torch.optim.sgd", "sgd", fused_kernels.sgd),
    ),
    *patches(
        "the ranks of a host would each make the whole step",
        ("torch.optim.rmsprop", "rmsprop", fused_kernels.rmsprop),
    ),
)

PATCHES: tuple[Patch, ...] = (
    *FILE_PATCHES,
    *STREAM_PATCHES,
    *WARNING_PATCHES,
    *SIGNAL_PATCHES,
    *PROCESS_PATCHES,
    *WORKER_PATCHES,
    *OPT_OUT_PATCHES,
    *SHARDED_CALL_PATCHES,
    *DEVICE_PATCHES,
    *OPTIMIZER_PATCHES,
    LOADER_PATCH,
    *SEED_PATCHES,
)

_VIRTUAL_SHARD_PATCHES: tuple[Patch, ...] = (
    *patches(
        "the gradients of large weights are computed from the rows of all shards",
        (nn.functional, "linear", overrides.linear),
        (nn.functional, "conv1d", overrides.conv),
        (nn.functional, "conv2d", overrides.conv),
        (nn.functional, "conv3d", overrides.conv),
    ),
    *ONE_PROCESS_PATCHES,
)
"""What `--bitwise` needs beside the rest, on any number of ranks."""
BITWISE_PATCHES: tuple[Patch, ...] = (
    *SHARDED_CALL_PATCHES,
    *OPTIMIZER_PATCHES,
    *_VIRTUAL_SHARD_PATCHES,
)
"""Those of a world of one with `--bitwise`."""

ONE_RANK_PATCHES: tuple[Patch, ...] = (
    *SIGNAL_PATCHES,
    *OPTIMIZER_PATCHES,
    LOADER_PATCH,
    *SEED_PATCHES,
)
"""Those of rank 0 after it was left alone."""

_handles: list[PatchHandle] = []


def install() -> None:
    """Install the whole table; does nothing the second time."""
    if not _handles:
        own = _VIRTUAL_SHARD_PATCHES if settings.is_bitwise() else ()
        _handles.append(PatchHandle([*PATCHES, *own]))  # these come before the opt-out


def remove() -> None:
    """Restore everything that was there before; does nothing the second time."""
    while _handles:
        _handles.pop().remove()


def install_for_one_rank() -> None:
    """In place of the whole table: the ranks share nothing any more."""
    remove()
    _handles.append(PatchHandle(ONE_RANK_PATCHES))


def install_files(rank_layer: Layer, before: Layer | None = None) -> None:
    """In a process that a rank spawned: see the files through the layers of that rank."""
    os_functions.set_files(OverlayFiles(rank_layer, before))
    _handles.append(PatchHandle(FILE_PATCHES))
