"""PyTorch's distributed_test.py as a class of tests; PyTorch's wheel has it without one."""

from __future__ import annotations

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    """Each test starts WORLD_SIZE processes, which make a group of BACKEND."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
