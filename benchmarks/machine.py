"""What a figure was measured on, and how figures are summed up."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import instep.version


def machine() -> dict[str, Any]:
    """This machine, now."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instep": instep.version.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, first and third quartile."""
    if len(values) == 1:
        return dict.fromkeys(("median", "q1", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def ratios(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Quartiles of what two contenders took in the same blocks."""
    return quartiles([a / b for a, b in zip(values, base, strict=True)])


def shown(ratio: dict[str, float]) -> str:
    """A ratio for people."""
    return "{median:.2f} ({q1:.2f} to {q3:.2f})".format(**ratio)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
