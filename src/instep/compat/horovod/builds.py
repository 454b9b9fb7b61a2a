"""What Horovod was built with, answered in PyTorch's and instep's terms."""

from __future__ import annotations

import torch


def mpi_built() -> bool:
    """False: instep does not talk through MPI (ranks may be started by mpirun)."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built


def gloo_built() -> bool:
    """True: CPU tensors travel through Gloo."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """NCCL's version as one number, such as 22304; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version[0] * 10_000 + version[1] * 100 + version[2]


def cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built with ROCm."""
    return torch.version.hip is not None
