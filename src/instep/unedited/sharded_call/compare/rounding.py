"""How far two forwards, or their gradients, may differ by rounding alone.

Layers that divide by the spread of nearly equal numbers, and units that are on for one rounding and
off for another, enlarge rounding: in one process as much as in a sharded call. So where a
comparison fails narrowly, the tolerance is widened by how far a call is from itself when its
parameters are one rounding error away (`perturbed`). Another reason are sums of many terms: in a
low precision, or where the terms cancel, as in the gradient of a bias in front of a batch
normalisation. Parameters one rounding error away leave the order of a sum as it is, and what it
rounds. So there the gradient is computed anew as the sum of two, each through one half of the
outputs' elements, and the tolerance is widened by the difference
(`VectorJacobianProducts.sum_errors`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from instep.process.patching import ignored_warnings
from instep.process.torch_private.autograd import hooks_of, run_backward
from instep.process.torch_private.devices import cpu_has_tf32, fp32_precision
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.run.tensor_subclasses import as_plain

FLIPPED_GRADIENT = 1e-2
"""How far gradients may differ where units flip by rounding. What is not summed, or summed twice,
is farther off, unless its weight is small."""
PERTURBATIONS = 3
"""How often a call's own noise is measured, and another rounding is tried."""
NOISE_FACTOR = 10.0
"""A sharded call may be this many times as far from the whole one as that is from itself."""
LEAST_ERROR = 1e-3
"""Smaller differences do not count where a plan is tried with values that are not the script's."""
MAX_ERROR = 1e-2
"""Larger differences of outputs and buffers do not count as rounding."""
MAX_GRADIENT_ERROR = 1e-1
MAX_PROVEN_ERROR = 0.5
"""The same for a call that is the same in a higher precision."""
SUM_FACTOR = 2.0
"""A gradient may be this many times as far off as `VectorJacobianProducts.sum_errors` says."""
_SMALL = 1e-2
"""Of the norm of all gradients: smaller ones are measured by this."""

SINGLE = (torch.float32, torch.complex64)

_ROUNDING = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""How far two forwards may differ, by the dtype they compute in: relative, in the norm."""
_GRADIENT_ROUNDING = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}
"""The same for gradients, where no unit flips: of 70 public programs in float32 the farthest was
2e-5 off, and the three in which units flip 6e-3 to 1e-2."""


def tolerance(dtype: torch.dtype, device: str = "cpu") -> float:
    """How far two forwards may differ by rounding: relative, in the norm."""
    return _ROUNDING.get(_computed_in(dtype, device), 0.0)


def _computed_in(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype whose rounding is in a result of dtype `dtype`."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return float32_computed_in(device) if dtype in SINGLE else dtype


def float32_computed_in(device: str) -> torch.dtype:
    """The dtype whose rounding may be in products and convolutions of float32.

    Which algorithm takes fewer bits depends on the batch's shape, too. PyTorch lets convolutions on
    a GPU by default.
    """
    backend = {"cuda": "cuda", "cpu": "mkldnn"}.get(device)
    used = {fp32_precision(backend, kind) for kind in ("matmul", "conv", "rnn") if backend}
    if "bf16" in used:
        return torch.bfloat16
    if "tf32" in used and (device == "cuda" or cpu_has_tf32()):
        return torch.float16  # of as many bits
    return torch.float32


def output_tolerance(output: Tensor) -> float:
    """How far two forwards may differ in this output."""
    return tolerance(output.dtype, output.device.type)


def gradient_tolerance(outputs: Sequence[Any], *, flips: bool) -> float:
    """How far the gradients of these outputs may differ; `flips`: where units flip by rounding."""
    dtypes = [_computed_in(x.dtype, x.device.type) for x in outputs if isinstance(x, Tensor)]
    limit = max((_GRADIENT_ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return max(limit, FLIPPED_GRADIENT) if flips else limit


def max_sum_error(outputs: Sequence[Any]) -> float:
    """How far gradients of these outputs may differ by the rounding of sums; what differs by more
    may be a backward that is not linear."""
    return max(MAX_GRADIENT_ERROR, 5 * gradient_tolerance(outputs, flips=False))


def allowed_error(limit: float, noise: float, max_error: float) -> float:
    """The tolerance for forwards of a call that is `noise` from itself."""
    return max(limit, min(NOISE_FACTOR * noise, max_error))


@contextmanager
def perturbed(module: nn.Module, seed: int) -> Iterator[None]:
    """Inside, the module's parameters are one rounding error away; the same on all ranks.

    Autograd does not see it: what it has saved before is in order again afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in nn.Module.parameters(module) if p.is_floating_point()]
    saved = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter.device)
        parameter.data.mul_(1 + noise.double() * torch.finfo(parameter.dtype).eps)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.data.copy_(value)


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference over the norm of `expected`, or over `floor` if that is more;
    infinite if rounding cannot be the reason."""
    actual, expected = as_plain(actual), as_plain(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if not (actual.is_floating_point() or actual.is_complex()):
        return 0.0 if torch.equal(actual, expected) else math.inf
    dtype = torch.complex128 if actual.is_complex() else torch.float64
    a, b = actual.detach().to(dtype), expected.detach().to(dtype)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return math.inf
    difference = float(torch.where(finite, a - b, 0).norm())
    return _ratio(difference, max(float(torch.where(finite, b, 0).norm()), floor))


def is_near(actual: Tensor, expected: Tensor) -> bool:
    """Whether an output is another one up to rounding."""
    return relative_error(actual, expected) <= output_tolerance(expected)


def gradient_errors(
    actual: Sequence[Sequence[Tensor | None]], expected: Sequence[Sequence[Tensor | None]]
) -> list[float]:
    """How far each gradient is off, relative to its norm or a part of the norm of all of its
    product."""
    return [
        error
        for product, other in zip(actual, expected, strict=True)
        for error in _gradient_errors(product, other)
    ]


def _gradient_errors(
    actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]
) -> list[float]:
    norms = [float(grad.norm()) for grad in expected if grad is not None]
    floor = _SMALL * math.hypot(*filter(math.isfinite, norms))
    return [_gradient_error(*pair, floor) for pair in zip(actual, expected, strict=True)]


def _gradient_error(actual: Tensor | None, expected: Tensor | None, floor: float) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    difference = float((actual - expected).norm())
    if not math.isfinite(difference):
        return relative_error(actual, expected, floor)
    return _ratio(difference, max(float(expected.norm()), floor))


def _ratio(difference: float, size: float) -> float:
    return (difference / size if size else math.inf) if difference else 0.0


def _half(cotangent: Tensor, generator: torch.Generator) -> Tensor:
    """About half of the elements, and zeros; of a scalar a third of it."""
    if not cotangent.dim():
        return cotangent / 3
    mask = torch.rand(cotangent.shape, generator=generator, device="cpu") < 0.5
    return cotangent.where(mask.to(cotangent.device), torch.zeros_like(cotangent))


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if one is None or other is None else one + other


Products = list[list[Tensor | None]]
"""For each product the gradients of its targets."""


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the script's hooks on the gradients of these are not called, and what they retain
    of their gradients (`retain_grad`) stays as it is."""
    hooked = [(hooks, dict(hooks)) for x in tensors if (hooks := hooks_of(x))]
    retained = [(x, x.grad) for x in tensors if x.retains_grad]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
        for x, grad in retained:
            x.grad = grad


@dataclass(frozen=True)
class VectorJacobianProducts:
    """Fixed gradients of some outputs, from which those of parameters and inputs follow.

    There is one product for the scalars among the outputs, which are losses as a rule, and one for
    the others: beside the gradients of many outputs those of a small term in a loss are nothing.
    """

    cotangents: tuple[dict[int, Tensor], ...]
    """Of each product, by the number of the output."""
    targets: list[Tensor]

    @classmethod
    def of(
        cls, call: BoundCall, outputs: Sequence[Any], others: Sequence[Tensor] = ()
    ) -> VectorJacobianProducts:
        """With random cotangents, the same on all ranks; `others`: more targets."""
        generator = torch.Generator().manual_seed(0)
        of_scalars, of_others = {}, {}
        for k, out in enumerate(outputs):
            if not (isinstance(out, Tensor) and out.requires_grad):
                continue
            if out.is_leaf and not torch.is_grad_enabled():  # a parameter, say: nothing leads to it
                continue
            if out.dim():
                drawn = torch.randn(out.shape, generator=generator, device="cpu")
                of_others[k] = drawn.to(out)
            else:
                of_scalars[k] = (1 + torch.rand((), generator=generator, device="cpu")).to(out)
        parameters = [p for p in nn.Module.parameters(call.module) if p.requires_grad]
        inputs = [x for x in call.tensors if x.requires_grad]
        targets = list({id(t): t for t in (*parameters, *others, *inputs)}.values())
        return cls(tuple(each for each in (of_others, of_scalars) if each), targets)

    def sum_errors(self, outputs: Sequence[Any], expected: Products) -> list[float]:
        """How far each gradient is from the sum of the one through half of the outputs' elements
        and the one through the others. That is rounding; empty where the backward is not linear."""
        if not self._is_linear(outputs, expected):
            return []
        found = []
        for seed in range(PERTURBATIONS):
            generator = torch.Generator().manual_seed(seed)
            ones = [
                {k: _half(cotangent, generator) for k, cotangent in product.items()}
                for product in self.cotangents
            ]
            others = [
                {k: cotangent - one[k] for k, cotangent in product.items()}
                for product, one in zip(self.cotangents, ones, strict=True)
            ]
            pairs = zip(self._through(ones, outputs), self._through(others, outputs), strict=True)
            found.append(gradient_errors([list(map(_add, *pair)) for pair in pairs], expected))
        return list(map(max, zip(*found, strict=True)))

    def _is_linear(self, outputs: Sequence[Any], expected: Products) -> bool:
        """Whether half of the outputs' gradients gives half of these, which rounds nothing."""
        halves = [{k: cotangent / 2 for k, cotangent in each.items()} for each in self.cotangents]
        found = self._through(halves, outputs)
        doubled = [list(map(_add, product, product)) for product in found]
        limit = gradient_tolerance(outputs, flips=False)
        return all(error <= limit for error in gradient_errors(doubled, expected))

    def _through(self, cotangents: Sequence[dict[int, Tensor]], outputs: Sequence[Any]) -> Products:
        return replace(self, cotangents=tuple(cotangents)).grads(outputs)

    def grads(self, outputs: Sequence[Any]) -> Products:
        """The gradients of the targets through these outputs, whose graph is kept."""
        return [self._grads(outputs, each) for each in self.cotangents]

    def _grads(self, outputs: Sequence[Any], cotangents: dict[int, Tensor]) -> list[Tensor | None]:
        keep_graph, create_graph, allow_unused = True, False, True
        # Said where the first work of autograd's thread for a GPU is a product of matrices.
        with (
            ignored_warnings("Attempting to run cuBLAS"),
            _without_hooks(self.targets),
            call_state.comparing_gradients(),
        ):
            found = run_backward(
                tuple(outputs[k] for k in cotangents),
                tuple(cotangents.values()),
                keep_graph,
                create_graph,
                tuple(self.targets),
                allow_unused,
                accumulate_grad=False,
            )
        return [None if grad is None else grad.to_dense() for grad in found]


def finite_error(actual: Tensor, whole: Tensor) -> float | None:
    """How far the elements are off that are finite in both; None if there are none."""
    finite = actual.isfinite() & whole.isfinite()
    return relative_error(actual[finite], whole[finite]) if finite.any() else None
