"""Starting ranks: `instep run`, its supervisor, the ranks' entry point, several hosts.

It leans on everything below it, but starting a job imports no PyTorch. Begin with `command` (the
options), `supervisor` (start, wait, end) and `worker.entry` (what a rank runs first).
"""
