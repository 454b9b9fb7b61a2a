"""The cases of unedited_table.py with more steps, for times: a run of 20 steps is mostly its
comparisons and trials."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

STEPS = 400
"""A longer run has about so many steps, or fewer where they are slow."""
SECONDS = 16.0
FEWER = {"pytorch_examples_reinforce": 84}
"""Steps of those in which, after more of them, a difference of rounding is one of the work: a later
episode is as long as its actions are good."""

_LENGTH = re.compile(
    r"(?:for (?:step|epoch|update|episode) in range\((?!1, )"
    r"|\b(?:max_|num_train_)?epochs=|max_steps=|\"--epochs\", type=int, default=)(\d+)"
)
_OTHERS = {
    "contrastive": r"(?:total_steps=|in range\()(\d+)",
    "char_transformer": r"max_iters = (\d+)",
    "dcgan": r"epochs = .*(\d+)\n",
    "diffusers_unet": r"repeat\((2),",
    "fastai_tabular": r"fit_one_cycle\((\d+)",
    "peft_lora": r"text = .*\((192),",
    "pytorch_examples_language_model": r"(?:arange\(20 \*|range\(0,) (\d+)",
    "pytorch_optimizer_sam": r"\b(640)\b",
    "sb3_ppo": r"learn\((\d+)",
    "time_series": r"for i in range\((\d+)",
    "transformers_checkpointing": r"text = .*\((128),",
    "transformers_gpt2_loop": r"text = .*\((320),",
    "transformers_llama_generate": r"16 \* (24)",
    "wgan_gp": r"n_epochs, batch_size = 12, 3, 10, (\d+)",
}
"""Where the number of steps comes from the number of rows, or from another argument."""


def write_longer(case: Path, steps: int, seconds: float, folder: Path) -> Path:
    """A copy of a case, of which `steps` have taken so long, with a multiple of them."""
    longest = FEWER.get(case.stem, STEPS)
    times = max(1, min(ceil(longest / steps), int(SECONDS / seconds)))
    text, length = case.read_text(), re.compile(_OTHERS.get(case.stem, _LENGTH))

    def multiply(found: re.Match[str]) -> str:
        start, end = (place - found.start() for place in found.span(1))
        return f"{found[0][:start]}{int(found[1]) * times}{found[0][end:]}"

    text, count = length.subn(multiply, text)
    assert count, f"no length in {case.name}"
    longer = folder / case.name
    longer.write_text(text)
    return longer
