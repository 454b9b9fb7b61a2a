"""All rules, by code. The first digit is the theme; each theme is one file."""

from __future__ import annotations

from instep.check.finding import Rule
from instep.check.rules import (
    checkpoints,
    counting,
    data,
    devices,
    evaluation,
    hangs,
    launch,
    optimisation,
    seeds,
    steps,
    two_lines,
    widths,
    writing,
)

THEMES = {
    "INS1": "Ranks that wait for each other",
    "INS2": "Metrics and evaluation",
    "INS3": "Data, seeds and augmentation",
    "INS4": "Learning rate, batch and wrappers",
    "INS5": "Devices and launching",
    "INS6": "Files and output",
}

_MODULES = (
    hangs, steps, counting, evaluation, data, seeds, optimisation, devices, launch, writing,
    checkpoints, widths, two_lines,
)  # fmt: skip
_FOUND = (
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Rule)
)
RULES: dict[str, Rule] = {found.code: found for found in sorted(_FOUND, key=lambda r: r.code)}
