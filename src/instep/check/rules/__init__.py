"""All rules, by code. The first digit is the theme; each theme is one file."""

from __future__ import annotations

from instep.check.finding import Rule
from instep.check.rules import data, devices, files, hangs, launch, metrics, optimisation

THEMES = {
    "INS1": "Ranks that wait for each other",
    "INS2": "Metrics and evaluation",
    "INS3": "Data, seeds and augmentation",
    "INS4": "Learning rate, batch and wrappers",
    "INS5": "Devices and launching",
    "INS6": "Files and output",
}

RULES: dict[str, Rule] = {
    found.code: found
    for found in sorted(
        (
            value
            for room in (hangs, metrics, data, optimisation, devices, launch, files)
            for value in vars(room).values()
            if isinstance(value, Rule)
        ),
        key=lambda found: found.code,
    )
}
