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

from instep.auto import children, devices, files, guards, listing, popens, streams, writers
from instep.auto.alone import LOADING, SEEDING
from instep.auto.layers import Layer
from instep.auto.patching import Patch, Patched
from instep.auto.shadow import Shadow
from instep.divided import backward, checkpoints, losses, modules, statistics
from instep.watch import interrupts

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

FILES = (
    Patch(builtins, "open", files.open_, _ONCE),
    Patch(io, "open", files.open_, _ONCE),
    Patch("tarfile", "bltn_open", files.open_, _ONCE),
    Patch("bz2", "_builtin_open", files.open_, _ONCE),
    Patch("lzma", "_builtin_open", files.open_, _ONCE),
    Patch("numpy.lib._datasource:_FileOpeners", "__getitem__", files.numpy_opener, _BY_NAME),
    Patch("_io", "open", files.open_, _ONCE),
    Patch(io, "FileIO", writers.file_io, _ONCE, makes_class=True),
    Patch(os, "open", files.os_open, _ONCE),
    Patch("posix", "open", writers.posix_open, _ONCE),
    Patch(os, "truncate", files.truncate, _ONCE),
    *(Patch(os, name, files.look, _SEEN) for name in ("stat", "statvfs")),
    *(Patch(os, name, files.look, _SEEN) for name in ("getxattr", "listxattr", "pathconf")),
    Patch(os, "access", files.access, _SEEN),
    *(Patch(os, name, files.look_at_link, _SEEN) for name in ("lstat", "readlink")),
    Patch(os, "listdir", listing.listdir, _SEEN),
    Patch(os, "scandir", listing.scandir, _SEEN),
    *(Patch(os, name, files.make, _ONCE) for name in ("mkdir", "mkfifo", "mknod")),
    Patch(os, "symlink", files.symlink, _ONCE),
    Patch(os, "link", files.link, _ONCE),
    *(Patch(os, name, files.unlink, _ONCE) for name in ("unlink", "remove")),
    Patch(os, "rmdir", files.rmdir, _ONCE),
    *(Patch(os, name, files.rename, _ONCE) for name in ("rename", "replace")),
    *(Patch(os, name, files.describe, _ONCE) for name in ("chmod", "chown", "lchown", "utime")),
    *(Patch(os, name, files.describe, _ONCE) for name in ("setxattr", "removexattr")),
    Patch(shutil, "rmtree", files.rmtree, "files are known by their paths"),
    Patch(os, "chdir", files.chdir, _SEEN),
    Patch(os, "getcwd", files.getcwd, _SEEN),
    Patch(os, "getcwdb", files.getcwdb, _SEEN),
    *(Patch(tempfile, name, files.temporary, _OWN) for name in ("mkstemp", "mkdtemp")),
    *(Patch(tempfile, f"{name}TemporaryFile", files.temporary, _OWN) for name in ("Named", "")),
    Patch("torch", "save", writers.torch_save, _BY_NAME),
    Patch("torch", "load", writers.torch_load, _BY_NAME),
    Patch("torch.jit", "load", writers.reads(0, "f"), _BY_NAME),
    *(
        Patch(f"torch._C:{name}", "save", writers.writes(1, "filename", checkpoint=True), _BY_NAME)
        for name in ("ScriptModule", "ScriptFunction")
    ),
    Patch("numpy", "save", writers.writes(0, "file", ".npy"), _WHOLE),
    *(
        Patch("numpy", name, writers.writes(0, "file", ".npz"), _WHOLE)
        for name in ("savez", "savez_compressed")
    ),
    Patch(
        "safetensors", "serialize_file", writers.writes(1, "filename", checkpoint=True), _BY_NAME
    ),
    Patch("safetensors", "safe_open", writers.reads(0, "filename"), _BY_NAME),
    Patch("h5py:File", "__init__", writers.opens, _BY_NAME),
    Patch("soundfile:SoundFile", "__init__", writers.opens, _BY_NAME),
    *(
        Patch(owner, "connect", writers.connect, _BY_NAME)
        for owner in ("sqlite3", "sqlite3.dbapi2")
    ),
    *(
        Patch(owner, "Connection", writers.connection, _BY_NAME, makes_class=True)
        for owner in ("sqlite3", "sqlite3.dbapi2")
    ),
    *(
        Patch("lmdb", name, writers.lmdb, _BY_NAME, makes_class=True)
        for name in ("Environment", "open")
    ),
    Patch("torch", "from_file", writers.from_file, _BY_NAME),
    Patch("torch._C._autograd:_ProfilerResult", "save", writers.writes(1, "path"), _BY_NAME),
    Patch("tokenizers:Tokenizer", "save", writers.writes(1, "path"), _BY_NAME),
    Patch("tokenizers:Tokenizer", "from_file", writers.reads(0, "path"), _BY_NAME),
    Patch(socket.socket, "bind", writers.bind, _ONCE),
    *(Patch(socket.socket, name, writers.reach, _SEEN) for name in ("connect", "connect_ex")),
    Patch("cv2", "imwrite", writers.writes(0, "filename"), _BY_NAME),
    Patch("cv2", "imread", writers.reads(0, "filename"), _BY_NAME),
    Patch("torchvision.io.image", "write_file", writers.writes(0, "filename"), _BY_NAME),
    Patch("torchvision.io.image", "read_file", writers.reads(0, "path"), _BY_NAME),
    Patch("pyarrow.parquet", "write_table", writers.writes(1, "where"), _BY_NAME),
    Patch("pyarrow.parquet", "read_table", writers.reads(0, "source"), _BY_NAME),
)
"""What every process needs that sees the files through layers."""

STREAMS = (
    Patch(builtins, "input", streams.input_, _TERMINAL),
    Patch(os, "read", streams.read, _TERMINAL),
    Patch(os, "isatty", streams.isatty, _TERMINAL),
    Patch(os, "get_terminal_size", streams.terminal_size, _TERMINAL),
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
        Patch(subprocess.Popen, name, getattr(popens, name.strip("_")), _CHILD)
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
    Patch("wandb", "init", writers.silent_init, "one run is logged, not one for each rank"),
)

GUARDS = (
    Patch(type(os.environ), "__getitem__", guards.environ_getitem, _LEFT),
    Patch(type(os.environ), "get", guards.environ_get, _HIDDEN),
    Patch(type(os.environ), "__contains__", guards.environ_contains, _HIDDEN),
    Patch("instep", "__getattr__", guards.window, _LEFT),
    Patch("torch.distributed", "is_initialized", guards.is_initialized, _HIDDEN),
    Patch("torch.distributed", "get_rank", guards.place, _HIDDEN),
    Patch("torch.distributed", "get_world_size", guards.place, _HIDDEN),
    *(
        Patch(owner, name, guards.claims(f"it {reason}"), _LEFT)
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

DIVISION: tuple[Patch, ...] = (
    Patch(nn.Module, "__call__", modules.call, "the outermost call of a module is divided"),
    Patch(torch.autograd, "backward", backward.backward, "sums over ranks travel meanwhile"),
    Patch(
        nn.functional,
        "batch_norm",
        statistics.batch_norm,
        "in a divided call the statistics are those of the whole batch",
        in_graphs=True,
    ),
    Patch(
        nn.SyncBatchNorm,
        "forward",
        statistics.sync_batch_norm,
        "it would add up what every rank has whole",
    ),
    Patch(
        "torch.utils.checkpoint",
        "checkpoint",
        checkpoints.checkpoint,
        "backward would compute again outside of the divided call",
    ),
    *(
        Patch(
            nn.functional,
            name,
            losses.loss,
            "in a divided call a loss is the whole batch's",
            in_graphs=True,
        )
        for name in losses.NAMES
    ),
)
"""What divides the calls of modules."""

DEVICES = tuple(
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
    *(*FILES, *STREAMS, *SIGNALS, *CHILDREN, *GUARDS, *DIVISION, *DEVICES),
    *(LOADING, *SEEDING),
)

_put_in: list[Patched] = []


def install() -> None:
    """Put the whole table in; does nothing where it is in already."""
    if not _put_in:
        _put_in.append(Patched(PATCHES))


def undo() -> None:
    """Take everything out again, exactly; does nothing where nothing is in."""
    while _put_in:
        _put_in.pop().undo()


def see_files(own: Layer, before: Layer | None = None) -> None:
    """In a process that a rank spawned: see the files through these layers, as the rank does."""
    files.play(Shadow(own, before))
    _put_in.append(Patched(FILES))
