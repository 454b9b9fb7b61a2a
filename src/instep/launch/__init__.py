"""Start the ranks of a job and supervise them: `instep run`, `spawn`, `slurm`, `horovodrun`, `env`.

It leans on every package below it, but the supervisor imports no PyTorch. Begin with `command`
(the options), `supervisor` (start, wait, end) and `worker.entry` (what a rank runs first).
"""
