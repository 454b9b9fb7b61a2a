"""How many files this process may have open at once: its connections grow with the job.

Most systems let a process open 1,024, and let it raise that itself to a limit that is higher.
"""

from __future__ import annotations

import resource

from instep.process import print_line


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
            f"need {count}."
        )
