"""How many files this process may have open at once, and how large they may be: its connections
grow with the job, and the memory that ranks share is files to the system.

Most systems let a process open 1,024, and let it raise that itself to a limit that is higher.
"""

from __future__ import annotations

import resource

from instep.errors import LaunchError
from instep.process import print_line

_LEAST_SIZE = 1 << 20
"""Bytes of a file: more than what a rank shares with its watcher."""


def allow_open_files(count: int) -> None:
    """Let this process, and those that it starts, open `count` files.

    Never lowers the limit. Prints a line where the system allows too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    reachable = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < count:
        print_line(
            f"this process may open {reachable} files (ulimit -Hn); a job of this size may "
            f'need {count}. If the job fails with "Too many open files", raise that limit or start '
            "fewer ranks."
        )


def check_file_size() -> None:
    """Raise LaunchError where the system allows files that are too small for any job."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_SIZE:
        raise LaunchError(
            f"a file may have {soft} bytes here (ulimit -f), and the memory that ranks share is "
            "files to the system. Raise the limit, by `ulimit -f unlimited` where that is allowed."
        )
