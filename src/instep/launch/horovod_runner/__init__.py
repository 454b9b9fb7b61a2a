"""`horovod.runner`: `horovod.run`, which calls a function on several processes of this host."""

from instep.launch.horovod_runner.run_function import run

__all__ = ["run"]
