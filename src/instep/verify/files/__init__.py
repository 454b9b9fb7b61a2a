"""The files that a run of the script changes, and how they are put back.

Begin with `restored`. The kernel tells of each system call that may change a file before it makes
it (seccomp_unotify(2)), whichever program and language it comes from. `file_calls` knows these
calls, `first_process` is the first process of a run, and `file_copies` copies and puts back.
"""
