"""PyTorch's private names of devices: which there are, and how they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

fp32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
set_fp32_precision: Callable[..., Any] = torch._C._set_fp32_precision_setter
"""In what products of float32 are computed, by backend ("generic", "cuda", "mkldnn") and kind of
operation ("all", "matmul", "conv", "rnn"): "ieee", "tf32", "bf16" or "none". The public setter of
mkldnn sets that of all backends."""
cpu_has_tf32: Callable[[], bool] = torch.cpu._is_amx_fp16_supported
known_accelerator = torch._C._accelerator_getAccelerator
"""The accelerator that this process knows, without asking its driver."""
device_constructors: Callable[[], set[Any]] = torch.utils._device._device_constructors
"""The functions to which a default device is given, as they are at the first call."""
dispatch_key_for_device = torch._C._dispatch_key_for_device
has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether a device computes an operation by itself."""
