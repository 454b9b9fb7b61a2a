"""The functions that are replaced in every process that sees the files through layers, and why."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import socket
import tempfile

from instep.process.patching import Patch, patches
from instep.unedited.files import directories, os_functions, sockets
from instep.unedited.files.compiled_code import libraries
from instep.unedited.files.compiled_code.libraries import reads_path, writes_path

_CHANGES = "rank 0 changes the real files, every other rank its own layer"
_OPENS_ITSELF = "this library opens files itself, not with Python's open"

FILE_PATCHES: tuple[Patch, ...] = (
    *patches(
        "every rank sees the files that one process would see",
        (os, "stat statvfs getxattr listxattr pathconf", os_functions.stat),
        (os, "lstat readlink", os_functions.lstat),
        (os, "access", os_functions.access),
        (os, "listdir", directories.listdir),
        (os, "scandir", directories.scandir),
        (os, "chdir", os_functions.chdir),
        (os, "getcwd", os_functions.getcwd),
        (os, "getcwdb", os_functions.getcwdb),
        (socket.socket, "connect connect_ex", sockets.socket_connect),
        (socket.socket, "getsockname getpeername", sockets.socket_name),
        (socket.socket, "sendto", sockets.socket_sendto),
        (socket.socket, "recvfrom recvfrom_into", sockets.socket_recvfrom),
    ),
    *patches(
        _CHANGES,
        (builtins, "open", os_functions.open_),
        (io, "open", os_functions.open_),
        ("_io", "open", os_functions.open_),
        ("tarfile", "bltn_open", os_functions.open_),
        ("bz2", "_builtin_open", os_functions.open_),
        ("lzma", "_builtin_open", os_functions.open_),
        (os, "open", os_functions.os_open),
        ("posix", "open", libraries.posix_open),
        (os, "truncate", os_functions.truncate),
        (os, "mkdir", os_functions.mkdir),
        (os, "mkfifo mknod", os_functions.mknod),
        (os, "symlink", os_functions.symlink),
        (os, "link", os_functions.link),
        (os, "unlink remove", os_functions.unlink),
        (os, "rmdir", os_functions.rmdir),
        (os, "rename replace", os_functions.rename),
        (os, "chmod chown lchown utime setxattr removexattr", os_functions.set_metadata),
        (socket.socket, "bind", sockets.socket_bind),
    ),
    *patches(_CHANGES, (io, "FileIO", libraries.file_io), factory=True),
    *patches(
        "the overlay knows files by their paths, not by their descriptors",
        (shutil, "rmtree", os_functions.rmtree),
    ),
    *patches(
        "every rank draws a name of its own, which no other rank can mean",
        (tempfile, "mkstemp mkdtemp NamedTemporaryFile TemporaryFile", libraries.make_temporary),
    ),
    *patches(
        "rank 0 may be ended while it writes, and the file must be complete or absent",
        ("numpy", "save", writes_path(0, "file", ".npy")),
        ("numpy", "savez savez_compressed", writes_path(0, "file", ".npz")),
    ),
    *patches(
        _OPENS_ITSELF,
        ("numpy.lib._datasource:_FileOpeners", "__getitem__", libraries.numpy_opener),
        ("torch", "save", libraries.torch_save),
        ("torch", "load", libraries.torch_load),
        ("torch", "from_file", libraries.torch_from_file),
        ("torch.jit", "load", reads_path("f")),
        ("torch._C:ScriptModule", "save", writes_path(1, "filename", checkpoint=True)),
        ("torch._C:ScriptFunction", "save", writes_path(1, "filename", checkpoint=True)),
        ("torch._C._autograd:_ProfilerResult", "save", writes_path(1, "path")),
        ("safetensors", "serialize_file", writes_path(1, "filename", checkpoint=True)),
        ("safetensors", "safe_open", reads_path("filename")),
        ("h5py:File", "__init__", libraries.file_init("name")),
        ("soundfile:SoundFile", "__init__", libraries.file_init("file")),
        ("sqlite3", "connect", libraries.sqlite_connect),
        ("sqlite3.dbapi2", "connect", libraries.sqlite_connect),
        ("tokenizers:Tokenizer", "save", writes_path(1, "path")),
        ("tokenizers:Tokenizer", "from_file", reads_path("path")),
        ("cv2", "imwrite", writes_path(0, "filename")),
        ("cv2", "imread", reads_path("filename")),
        ("torchvision.io.image", "write_file", writes_path(0, "filename")),
        ("torchvision.io.image", "read_file", reads_path("path")),
        ("pyarrow.parquet", "write_table", writes_path(1, "where")),
        ("pyarrow.parquet", "read_table", reads_path("source")),
    ),
    *patches(
        _OPENS_ITSELF,
        ("sqlite3", "Connection", libraries.sqlite_connection),
        ("sqlite3.dbapi2", "Connection", libraries.sqlite_connection),
        ("lmdb", "Environment open", libraries.database_environment),
        factory=True,
    ),
)
