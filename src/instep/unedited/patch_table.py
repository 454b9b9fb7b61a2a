"""The table: every function that answers for another one while a script is divided, and why.

The rooms provide the replacements; this is the only place where they are put in. In a world of one
only loaders are divided, into one part, and unseeded generators seeded: so their random numbers are
those of any other world.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
import socket
import subprocess
import tempfile

import torch
from torch import nn

from instep.distributed.watchdog import interrupts
from instep.process.patching import Patch, PatchHandle
from instep.unedited import devices, opt_out, std_streams
from instep.unedited.files import libraries, listings, os_functions
from instep.unedited.files.layers import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.processes import children, popen
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run import backward, losses, overrides
from instep.unedited.single_rank import LOADER_PATCH, SEED_PATCHES

_SEEN = "each rank sees the files as one process would have left them"
_ONCE = "rank 0 changes the files, the others what they see of them"
_BY_NAME = "this library opens the file itself"
_WHOLE = "rank 0 may be ended while it writes"
_OWN = "its name is drawn by each process, so it is no other rank's"
_TERMINAL = "stdin and the terminal are rank 0's, on all ranks"
_INTERRUPT = "an interrupt takes effect at the same point on every rank"
_CHILD = "a child process runs once, and all ranks get what came of it"
_LEFT = "a script that is distributed already is left alone"
_HIDDEN = "the script knows of one process"
_REFUSED = "training processes of the script's own cannot be divided"

FILE_PATCHES = (
    Patch(builtins, "open", os_functions.open_, _ONCE),
    Patch(io, "open", os_functions.open_, _ONCE),
    Patch("tarfile", "bltn_open", os_functions.open_, _ONCE),
    Patch("bz2", "_builtin_open", os_functions.open_, _ONCE),
    Patch("lzma", "_builtin_open", os_functions.open_, _ONCE),
    Patch("numpy.lib._datasource:_FileOpeners", "__getitem__", os_functions.numpy_opener, _BY_NAME),
    Patch("_io", "open", os_functions.open_, _ONCE),
    Patch(io, "FileIO", libraries.file_io, _ONCE, factory=True),
    Patch(os, "open", os_functions.os_open, _ONCE),
    Patch("posix", "open", libraries.posix_open, _ONCE),
    Patch(os, "truncate", os_functions.truncate, _ONCE),
    *(Patch(os, name, os_functions.look, _SEEN) for name in ("stat", "statvfs")),
    *(Patch(os, name, os_functions.look, _SEEN) for name in ("getxattr", "listxattr", "pathconf")),
    Patch(os, "access", os_functions.access, _SEEN),
    *(Patch(os, name, os_functions.look_at_link, _SEEN) for name in ("lstat", "readlink")),
    Patch(os, "listdir", listings.listdir, _SEEN),
    Patch(os, "scandir", listings.scandir, _SEEN),
    *(Patch(os, name, os_functions.make, _ONCE) for name in ("mkdir", "mkfifo", "mknod")),
    Patch(os, "symlink", os_functions.symlink, _ONCE),
    Patch(os, "link", os_functions.link, _ONCE),
    *(Patch(os, name, os_functions.unlink, _ONCE) for name in ("unlink", "remove")),
    Patch(os, "rmdir", os_functions.rmdir, _ONCE),
    *(Patch(os, name, os_functions.rename, _ONCE) for name in ("rename", "replace")),
    *(
        Patch(os, name, os_functions.describe, _ONCE)
        for name in ("chmod", "chown", "lchown", "utime")
    ),
    *(Patch(os, name, os_functions.describe, _ONCE) for name in ("setxattr", "removexattr")),
    Patch(shutil, "rmtree", os_functions.rmtree, "files are known by their paths"),
    Patch(os, "chdir", os_functions.chdir, _SEEN),
    Patch(os, "getcwd", os_functions.getcwd, _SEEN),
    Patch(os, "getcwdb", os_functions.getcwdb, _SEEN),
    *(Patch(tempfile, name, os_functions.temporary, _OWN) for name in ("mkstemp", "mkdtemp")),
    *(
        Patch(tempfile, f"{name}TemporaryFile", os_functions.temporary, _OWN)
        for name in ("Named", "")
    ),
    Patch("torch", "save", libraries.torch_save, _BY_NAME),
    Patch("torch", "load", libraries.torch_load, _BY_NAME),
    Patch("torch.jit", "load", libraries.reads(0, "f"), _BY_NAME),
    *(
        Patch(
            f"torch._C:{name}", "save", libraries.writes(1, "filename", checkpoint=True), _BY_NAME
        )
        for name in ("ScriptModule", "ScriptFunction")
    ),
    Patch("numpy", "save", libraries.writes(0, "file", ".npy"), _WHOLE),
    *(
        Patch("numpy", name, libraries.writes(0, "file", ".npz"), _WHOLE)
        for name in ("savez", "savez_compressed")
    ),
    Patch(
        "safetensors", "serialize_file", libraries.writes(1, "filename", checkpoint=True), _BY_NAME
    ),
    Patch("safetensors", "safe_open", libraries.reads(0, "filename"), _BY_NAME),
    Patch("h5py:File", "__init__", libraries.opens, _BY_NAME),
    Patch("soundfile:SoundFile", "__init__", libraries.opens, _BY_NAME),
    *(
        Patch(owner, "connect", libraries.connect, _BY_NAME)
        for owner in ("sqlite3", "sqlite3.dbapi2")
    ),
    *(
        Patch(owner, "Connection", libraries.connection, _BY_NAME, factory=True)
        for owner in ("sqlite3", "sqlite3.dbapi2")
    ),
    *(
        Patch("lmdb", name, libraries.lmdb, _BY_NAME, factory=True)
        for name in ("Environment", "open")
    ),
    Patch("torch", "from_file", libraries.from_file, _BY_NAME),
    Patch("torch._C._autograd:_ProfilerResult", "save", libraries.writes(1, "path"), _BY_NAME),
    Patch("tokenizers:Tokenizer", "save", libraries.writes(1, "path"), _BY_NAME),
    Patch("tokenizers:Tokenizer", "from_file", libraries.reads(0, "path"), _BY_NAME),
    Patch(socket.socket, "bind", libraries.bind, _ONCE),
    *(Patch(socket.socket, name, libraries.reach, _SEEN) for name in ("connect", "connect_ex")),
    Patch("cv2", "imwrite", libraries.writes(0, "filename"), _BY_NAME),
    Patch("cv2", "imread", libraries.reads(0, "filename"), _BY_NAME),
    Patch("torchvision.io.image", "write_file", libraries.writes(0, "filename"), _BY_NAME),
    Patch("torchvision.io.image", "read_file", libraries.reads(0, "path"), _BY_NAME),
    Patch("pyarrow.parquet", "write_table", libraries.writes(1, "where"), _BY_NAME),
    Patch("pyarrow.parquet", "read_table", libraries.reads(0, "source"), _BY_NAME),
)
"""What every process needs that sees the files through layers."""

STREAMS = (
    Patch(builtins, "input", std_streams.input_, _TERMINAL),
    Patch(os, "read", std_streams.read, _TERMINAL),
    Patch(os, "isatty", std_streams.isatty, _TERMINAL),
    Patch(os, "get_terminal_size", std_streams.terminal_size, _TERMINAL),
)

SIGNALS = (
    Patch(signal, "signal", interrupts.set_handler, _INTERRUPT),
    Patch(signal, "getsignal", interrupts.get_handler, _INTERRUPT),
)

CHILDREN = (
    Patch(subprocess, "run", children.run, _CHILD),
    Patch(subprocess, "call", children.run, _CHILD),
    Patch(os, "system", children.system, _CHILD),
    *(
        Patch(subprocess.Popen, name, getattr(popen, name.strip("_")), _CHILD)
        for name in ("__init__", "poll", "wait", "communicate", "send_signal")
    ),
    *(Patch(os, name, children.spawn, _CHILD) for name in ("spawnv", "spawnve")),
    *(Patch(os, name, children.spawn, _CHILD) for name in ("spawnvp", "spawnvpe")),
    *(Patch(os, name, children.posix_spawn, _CHILD) for name in ("posix_spawn", "posix_spawnp")),
    Patch(os, "waitpid", children.waitpid, _CHILD),
    *(Patch(os, name, children.kill, _CHILD) for name in ("kill", "killpg")),
    Patch("pty", "spawn", children.interact, _CHILD),
    Patch("asyncio.unix_events:_UnixSubprocessTransport", "_start", children.asyncio_start, _CHILD),
    Patch("multiprocessing.spawn", "get_preparation_data", children.preparation_data, _SEEN),
    Patch("torch.multiprocessing.spawn", "start_processes", children.start_processes, _REFUSED),
    Patch("torch.multiprocessing", "start_processes", children.start_processes, _REFUSED),
    Patch("torch.nn:Module", "share_memory", children.share_memory, _REFUSED),
    Patch("multiprocessing.process:BaseProcess", "start", children.start, _REFUSED),
    Patch("wandb", "init", libraries.silent_init, "one run is logged, not one for each rank"),
)

GUARDS = (
    Patch(type(os.environ), "__getitem__", opt_out.environ_getitem, _LEFT),
    Patch(type(os.environ), "get", opt_out.environ_get, _HIDDEN),
    Patch(type(os.environ), "__contains__", opt_out.environ_contains, _HIDDEN),
    Patch("instep", "__getattr__", opt_out.window, _LEFT),
    Patch("torch.distributed", "is_initialized", opt_out.is_initialized, _HIDDEN),
    Patch("torch.distributed", "get_rank", opt_out.place, _HIDDEN),
    Patch("torch.distributed", "get_world_size", opt_out.place, _HIDDEN),
    *(
        Patch(owner, name, opt_out.claims(f"it {reason}"), _LEFT)
        for owner, name, reason in (
            ("torch.distributed", "init_process_group", "starts a process group of its own"),
            (
                "torch.nn.parallel:DistributedDataParallel",
                "__init__",
                "uses DistributedDataParallel",
            ),
            ("horovod.torch", "init", "uses Horovod"),
            ("apex.parallel:DistributedDataParallel", "__init__", "uses Apex"),
            ("deepspeed", "initialize", "uses DeepSpeed"),
            ("deepspeed", "init_distributed", "uses DeepSpeed"),
            ("accelerate.state:PartialState", "__init__", "uses Accelerate"),
            ("lightning.fabric.fabric:Fabric", "__init__", "uses Lightning"),
            ("lightning.pytorch.trainer.trainer:Trainer", "__init__", "uses Lightning"),
            ("lightning_fabric.fabric:Fabric", "__init__", "uses Lightning"),
            ("pytorch_lightning.trainer.trainer:Trainer", "__init__", "uses Lightning"),
        )
    ),
)

SHARDED_CALL_PATCHES: tuple[Patch, ...] = (
    Patch(nn.Module, "__call__", modules.call_module, "the outermost call of a module is divided"),
    Patch(torch.autograd, "backward", backward.backward, "sums over ranks travel meanwhile"),
    Patch(
        nn.functional,
        "batch_norm",
        overrides.batch_norm,
        "in a divided call the statistics are those of the whole batch",
        compile="break",
    ),
    Patch(
        nn.SyncBatchNorm,
        "forward",
        overrides.sync_batch_norm,
        "it would add up what every rank has whole",
    ),
    Patch(
        "torch.utils.checkpoint",
        "checkpoint",
        overrides.checkpoint,
        "backward would compute again outside of the divided call",
    ),
    *(
        Patch(
            nn.functional,
            name,
            losses.loss,
            "in a divided call a loss is the whole batch's",
            compile="break",
        )
        for name in losses.NAMES
    ),
)
"""What divides the calls of modules."""

DEVICE_PATCHES = tuple(
    Patch(owner, name, devices.on_own(*arguments), "a rank has one device, its own")
    for owner, name, arguments in (
        (nn.DataParallel, "__init__", ("device_ids", "output_device")),
        (nn.parallel, "data_parallel", ("device_ids", "output_device")),
        (nn.parallel, "replicate", ("devices",)),
        (nn.parallel, "scatter", ("target_gpus",)),
        (nn.parallel, "parallel_apply", ("devices",)),
        (nn.parallel, "gather", ("target_device",)),
    )
)
"""What lets scripts for several devices of one host run on one."""

PATCHES: tuple[Patch, ...] = (
    *(
        *FILE_PATCHES,
        *STREAMS,
        *SIGNALS,
        *CHILDREN,
        *GUARDS,
        *SHARDED_CALL_PATCHES,
        *DEVICE_PATCHES,
    ),
    *(LOADER_PATCH, *SEED_PATCHES),
)

_put_in: list[PatchHandle] = []


def install() -> None:
    """Put the whole table in; does nothing where it is in already."""
    if not _put_in:
        _put_in.append(PatchHandle(PATCHES))


def undo() -> None:
    """Take everything out again, exactly; does nothing where nothing is in."""
    while _put_in:
        _put_in.pop().remove()


def see_files(own: Layer, before: Layer | None = None) -> None:
    """In a process that a rank spawned: see the files through these layers, as the rank does."""
    os_functions.play(OverlayFiles(own, before))
    _put_in.append(PatchHandle(FILE_PATCHES))
