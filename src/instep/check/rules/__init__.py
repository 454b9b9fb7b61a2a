"""All rules, by code. The first digit is the theme."""

from __future__ import annotations

from instep.check.finding import Rule
from instep.check.rules import (
    amp,
    checkpoints,
    counting,
    data,
    ddp,
    devices,
    evaluation,
    launch,
    optimisation,
    seeds,
    two_lines,
    widths,
    writing,
)
from instep.check.rules.hangs import collectives, step_counts, steps

THEMES = {
    "INS1": "Ranks that wait for each other",
    "INS2": "Metrics and evaluation",
    "INS3": "Data, seeds and augmentation",
    "INS4": "Learning rate, batch and wrappers",
    "INS5": "Devices and launching",
    "INS6": "Files and output",
}

_MODULES = (
    collectives, step_counts, steps, counting, evaluation, data, ddp, seeds, optimisation, amp,
    devices, launch, writing, checkpoints, widths, two_lines,
)  # fmt: skip
_FOUND = (
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Rule)
)
RULES: dict[str, Rule] = {found.code: found for found in sorted(_FOUND, key=lambda r: r.code)}
