"""`horovod.runner`: `horovod.run`, which calls a function on several processes of this host."""

from instep.launch.horovod_runner.run_function import run

__all__ = ["run"]

__version__ = "0.28.1"
"""`horovod.__version__`: the release whose interface this is."""
