"""The ranks compare the gradients of steps that they divide, every INSTEP_DRIFT_STEPS steps.

After such a step all ranks have the same parameters, whatever gradients they had: each part comes
from one rank. So a difference shows in the gradients only, and `comparison` would never see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.process import settings
from instep.process.exit_status import group_ranks
from instep.training.drift.bit_sums import bit_sums, combine, is_comparable
from instep.training.drift.comparison import (
    is_compared_step,
    is_rounding,
    measure_difference,
    name_of,
)
from instep.training.errors import DriftError


class GradientCheck:
    """Compares the gradients, and the options, of one optimizer's steps."""

    def __init__(self) -> None:
        self._step = 0
        self._same_at = 0

    def begin_step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        options: Mapping[str, object],
        transport: Transport,
    ) -> None:
        """The ranks are about to divide a step: compare if it is time to. Collective.

        Args:
            gradients: one for each of the parameters, or None.
            options: hyper-parameters that must be the same on all ranks, by their names.

        Raises DriftError on every rank. A difference that rounding explains is none.
        """
        self._step += 1
        if not is_compared_step(self._step, int(settings.DRIFT_STEPS)):
            return
        compared = {
            place: gradient
            for place, gradient in enumerate(gradients)
            if gradient is not None and is_comparable(gradient)
        }
        sums = bit_sums(compared.values())
        texts = {name: repr(value) for name, value in sorted(options.items())}
        code = crc32(repr((list(compared), texts)).encode())
        mine = torch.tensor([combine(sums), code], device="cpu").to(transport.control_device)
        if any(not torch.equal(theirs, mine) for theirs in transport.all_gather(mine)):
            rows = dict(zip(compared, sums.tolist(), strict=True))
            since = (max(self._same_at, 1), self._step)
            _check_options(transport.all_gather_object(texts), since)
            _check_gradients(
                parameters, compared, transport.all_gather_object(rows), since, transport
            )
        self._same_at = self._step


def _check_options(of_ranks: Sequence[Mapping[str, str]], since: tuple[int, int]) -> None:
    for name in of_ranks[0]:
        values = [theirs.get(name, "none") for theirs in of_ranks]
        if len({*values}) > 1:
            raise DriftError.of_option(f"{name} of an optimizer", group_ranks(values), since)


def _check_gradients(
    parameters: Sequence[Tensor],
    compared: Mapping[int, Tensor],
    of_ranks: Sequence[Mapping[int, int]],
    since: tuple[int, int],
    transport: Transport,
) -> None:
    """`of_ranks`: the checksums of each rank's gradients, by place. Collective."""
    found = []
    for place in sorted({place for theirs in of_ranks for place in theirs}):
        ways = [theirs.get(place) for theirs in of_ranks]
        if len({*ways}) == 1:
            continue
        name = f"the gradient of {name_of(parameters[place])}"
        if None in ways:
            shown = ["missing" if way is None else "there" for way in ways]
            raise DriftError.of_option(name, group_ranks(shown), since)
        gradient = compared[place]
        largest, difference = measure_difference(gradient, transport)
        if not is_rounding(gradient.dtype, largest, difference):
            found.append((name, group_ranks(ways), difference))
    if found:
        (name, groups, difference), *others = found
        raise DriftError.of_tensor(name, groups, since, difference, len(others))
