"""The replacements of `open` and of the functions of `os` that take a path.

Rank 0 keeps what it is about to change and calls the original. Other ranks call the original with
the location of their own version. A path that is relative to a directory's descriptor (`dir_fd=`)
becomes an absolute one. A function that is given the descriptor of a file is not affected.
"""

from __future__ import annotations

import functools
import os
import shutil
from inspect import signature
from typing import Any

from instep.process.patching import Function, replaced
from instep.process.pending_writes import opens_to_write
from instep.process.process_value import ProcessValue
from instep.unedited.files.bypass import bypass_overlay, is_bypassed
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.paths import PassthroughFiles, script_paths_in_errors

_real_open = os.open
"""As it is before it is replaced."""
PASSTHROUGH = PassthroughFiles()
_current = ProcessValue(PASSTHROUGH)


def set_files(files: PassthroughFiles | None) -> None:
    """Let file calls of this process go through `files`; None: let them act as without instep."""
    _current.value = files or PASSTHROUGH


def current_files() -> PassthroughFiles:
    """The argument of the latest `set_files`; PASSTHROUGH for None."""
    return _current.value


def files_for(*paths: object) -> PassthroughFiles:
    """The files through which a call with these paths goes."""
    if is_bypassed() or any(isinstance(path, int) for path in paths):
        return PASSTHROUGH
    return _current.value


# -------------------------------------------------------------------- paths relative to `dir_fd`

_RELATIVE = {"dir_fd": ("dst", "path"), "src_dir_fd": ("src",), "dst_dir_fd": ("dst",)}
"""The parameter that is relative to this one: the first of these that the function has."""


def _resolve_dir_fds(function: Function) -> Function:
    """A replacement that gets absolute paths for those relative to a directory's descriptor."""
    names = list(signature(function).parameters)

    @functools.wraps(function)
    def with_absolute_paths(original: Function, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return function(original, *args)
        fds = {name: kwargs.pop(name) for name in _RELATIVE if kwargs.get(name) is not None}
        if not fds:
            return function(original, *args, **kwargs)
        bound = signature(function).bind(original, *args, **kwargs)
        given = [bound.arguments[name] for name in ("path", "src", "dst") if name in names]
        files = files_for(*given)
        if files is PASSTHROUGH:
            return function(original, *args, **kwargs, **fds)
        with script_paths_in_errors(*given):
            for name, fd in fds.items():
                parameter = next(each for each in _RELATIVE[name] if each in names)
                bound.arguments[parameter] = _join(fd, bound.arguments[parameter], files)
            return function(*bound.args, **bound.kwargs)

    return with_absolute_paths


def _join(fd: int, path: Any, files: PassthroughFiles) -> str:
    """The absolute path of a path that is relative to this descriptor's directory."""
    text = os.fsdecode(path)
    if os.path.isabs(text):
        return text
    try:
        return os.path.join(files.open_directories.path_of(fd), text)
    except OSError as error:
        error.filename = path
        raise


# -------------------------------------------------------- for libraries that open files themselves


def path_to_read(path: Any) -> Any:
    """The location at which a library is to read `path`."""
    return files_for(path).location_to_read(path)


def path_to_write(path: Any, flags: int) -> Any:
    """The location at which it is to write `path`. Raises what os.open with these flags raises."""
    return files_for(path).location_to_write(path, flags)


# ------------------------------------------------------------------------------------ opening


def open_(
    original: Function, file: Any, mode: str = "r", *args: Any, opener: Any = None, **kwargs: Any
) -> Any:
    """For `open`. If the script gives an opener, that calls os.open."""
    files = files_for(file)
    given = opener or (args[5] if len(args) > 5 else None)
    reads = files is PASSTHROUGH or not opens_to_write(mode)
    if not reads:
        files.keep(file)
    if isinstance(files, OverlayFiles) and given is None:
        if reads:
            is_installed, opened = files.use_installed(
                file, functools.partial(_open_at, original, file, mode, *args[:5], **kwargs), _close
            )
            if is_installed:
                return opened
        return original(file, mode, *args[:5], opener=_opener, **kwargs)
    return original(file, mode, *args[:5], opener=given, **kwargs)


def _open_at(original: Function, file: Any, *args: Any, **kwargs: Any) -> Any:
    """Open a file that is to have the name `file`, at the location that is the last of `args`."""
    *others, location = args
    if location != file:
        kwargs["opener"] = lambda _, flags: _real_open(location, flags, 0o666)
    return original(file, *others, **kwargs)


def _close(file: Any) -> None:
    if file is not None:  # it is for io.FileIO's __init__
        file.close()


def _opener(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o666)


@_resolve_dir_fds
def os_open(
    original: Function, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> Any:
    """For os.open."""
    files = files_for(path)
    if opens_to_write(None, flags):
        files.keep(path)
    if not isinstance(files, OverlayFiles):
        return original(path, flags, mode, dir_fd=dir_fd)
    with script_paths_in_errors(path):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return original(_directory_of_unnamed(files, path), flags, mode)
        if opens_to_write(None, flags):
            return original(files.location_to_write(path, flags), flags | os.O_CREAT, mode)
    fd: int = files.use(
        path, lambda location: original(location, flags, mode), os.close, reads_content=True
    )
    files.record_open(fd, path)
    return fd


@bypass_overlay()
def _directory_of_unnamed(files: OverlayFiles, path: Any) -> str:
    """Where this rank makes a file without a name that the script wants in the directory `path`."""
    directory = files.location(path)
    if not (os.path.isdir(directory) and os.access(directory, os.W_OK)):
        return directory  # the kernel says why this fails
    os.makedirs(files.layers[0].directory, exist_ok=True)
    return files.layers[0].directory


def truncate(original: Function, path: Any, length: int) -> None:
    """For os.truncate."""
    with script_paths_in_errors(path):
        original(path_to_write(path, 0), length)


# ----------------------------------------------------------------------------------- metadata


def _reads_metadata(*, follow: bool) -> Function:
    """A replacement of a function that reads a path; `follow`: whether it follows a link."""

    @_resolve_dir_fds
    def answer(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        follows = kwargs.get("follow_symlinks", follow)
        return files_for(path).use(path, lambda at: original(at, *args, **kwargs), follow=follows)

    return answer


stat, lstat = _reads_metadata(follow=True), _reads_metadata(follow=False)
"""For os.stat, os.statvfs, os.getxattr and so on; for os.lstat and os.readlink."""


def access(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.access, which raises nothing."""
    try:
        return stat(original, path, *args, **kwargs)
    except (FileNotFoundError, NotADirectoryError):
        return False


@_resolve_dir_fds
def set_metadata(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.chmod, os.utime and so on. A file that is not this rank's own stays as it is."""
    with script_paths_in_errors(path):
        location = files_for(path).own_location(path, follow=kwargs.get("follow_symlinks", True))
        return None if location is None else original(location, *args, **kwargs)


# ----------------------------------------------------------------------------------- changing


def _makes(*, directory: bool) -> Function:
    """A replacement of a function that makes a directory, or another thing, at a path."""

    @_resolve_dir_fds
    def answer(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        with script_paths_in_errors(path):
            location = files_for(path).new_location(path, directory=directory)
            return original(location, *args, **kwargs)

    return answer


mkdir, mknod = _makes(directory=True), _makes(directory=False)
"""For os.mkdir; for os.mknod and os.mkfifo."""


@_resolve_dir_fds
def symlink(original: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.symlink."""
    if not files_for(dst).symlink(src, dst):
        original(src, dst, *args, **kwargs)


_LINK_FOLLOWS = "os.name" in (getattr(os.link, "__text_signature__", None) or "")
"""Whether os.link follows without descriptors, too: since it does, its default names the system."""


def link(
    original: Function, src: Any, dst: Any, *, follow_symlinks: bool = True, **dir_fds: int | None
) -> Any:
    """For os.link, which follows a symbolic link `src`: in older Pythons (3.13) only if it is given
    descriptors, on Linux."""
    files = files_for(dst, src)
    if files is PASSTHROUGH:
        return original(src, dst, follow_symlinks=follow_symlinks, **dir_fds)
    follows = _LINK_FOLLOWS or any(fd is not None for fd in dir_fds.values())
    if not (follow_symlinks and follows):
        return _link(original, src, dst, **dir_fds)
    with script_paths_in_errors(src, dst):
        fd = dir_fds.pop("src_dir_fd", None)
        absolute = src if fd is None else _join(fd, src, files)
        return _link(original, os.path.realpath(absolute, strict=True), dst, **dir_fds)


@_resolve_dir_fds
def _link(original: Function, src: Any, dst: Any, **kwargs: Any) -> None:
    if not files_for(dst, src).link(src, dst):
        original(src, dst, follow_symlinks=False, **kwargs)


@_resolve_dir_fds
def unlink(original: Function, path: Any, *, dir_fd: int | None = None) -> None:
    """For os.unlink and os.remove."""
    if not files_for(path).unlink(path):
        original(path, dir_fd=dir_fd)


@_resolve_dir_fds
def rmdir(original: Function, path: Any, *, dir_fd: int | None = None) -> None:
    """For os.rmdir."""
    if not files_for(path).rmdir(path):
        original(path, dir_fd=dir_fd)


@_resolve_dir_fds
def rename(original: Function, src: Any, dst: Any, **kwargs: Any) -> None:
    """For os.rename and os.replace."""
    if not files_for(src, dst).rename(src, dst):
        original(src, dst, **kwargs)


def rmtree(
    original: Function, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any
) -> Any:
    """For shutil.rmtree: let it work by paths, not by file descriptors."""
    files = files_for(path)
    if files is PASSTHROUGH:
        return original(path, *args, dir_fd=dir_fd, **kwargs)
    if dir_fd is not None:
        with script_paths_in_errors(path):
            return rmtree(original, _join(dir_fd, path, files), *args, **kwargs)
    with replaced((shutil, "_use_fd_functions", False)):
        return original(path, *args, **kwargs)


# ---------------------------------------------------------------------------- current directory


def chdir(original: Function, path: Any) -> None:
    """For os.chdir."""
    with script_paths_in_errors(path):
        if not files_for(path).change_directory(path):
            original(path)


def getcwd(original: Function) -> str:
    """For os.getcwd."""
    return files_for().own_directory() or original()


def getcwdb(original: Function) -> bytes:
    """For os.getcwdb."""
    return os.fsencode(os.getcwd())
