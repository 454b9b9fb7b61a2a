"""DDP beside remote calls: tests of PyTorch's wheel, which leaves the agent to others."""

from __future__ import annotations

from torch.testing._internal.distributed.ddp_under_dist_autograd_test import (
    DdpComparisonTest,
    DdpUnderDistAutogradTest,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc_utils import generate_tests

globals().update(
    generate_tests(
        "TensorPipe",
        TensorPipeRpcAgentTestFixture,
        [DdpComparisonTest, DdpUnderDistAutogradTest],
        __name__,
    )
)
del DdpComparisonTest, DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture
