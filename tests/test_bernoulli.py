"""Zeros and ones that are drawn for the whole batch and compared for a part of it."""

from __future__ import annotations

import pytest
import torch

import components
from instep.training.draws import bernoulli


@pytest.mark.parametrize("p", [0, 2**-40, 0.1, 0.5, 0.7, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_they_are_uniform_numbers_below_p(p: float, dtype: torch.dtype) -> None:
    """So is the number of the generator's steps."""
    ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    bits = bernoulli.draw_bits(torch.empty(6, 500, dtype=torch.int64), ours)
    found = bernoulli.compare(bits[2:4], p, torch.empty(2, 500, dtype=dtype))
    uniform = torch.empty(6, 500, dtype=torch.float64).uniform_(generator=theirs)
    assert torch.equal(found, (uniform[2:4] < p).to(dtype))
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_it_is_known_whether_torch_draws_them_so(p: float) -> None:
    x = torch.empty(300, 400).t()
    torch.manual_seed(3)
    expected = torch.empty_like(x).bernoulli_(p)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    bits = bernoulli.draw_bits(torch.empty_like(x, dtype=torch.int64))
    same = torch.equal(bernoulli.compare(bits, p, x), expected)
    same = same and torch.equal(torch.get_rng_state(), state)
    assert same is bernoulli.can_compare(x, p)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), torch.tensor(0.5)])
def test_other_probabilities_are_left_to_torch(p: object) -> None:
    assert not bernoulli.can_compare(torch.empty(2), p)


def test_other_devices_are_left_to_torch() -> None:
    assert not bernoulli.can_compare(torch.empty(2, device="meta"), 0.5)


@components.needs("C++")
@pytest.mark.parametrize("p", [0.0, 2**-40, 0.1, 0.7, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("drawn", [0, 1, 311, 622, 623, 624])
def test_some_of_them_are_drawn_as_torch_draws_all(drawn: int, p: float) -> None:
    """Whatever the generator has drawn before: a round of it has 624 numbers, an element two."""
    ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for generator in (ours, theirs):
        torch.rand(drawn, generator=generator)
    parts = [torch.empty(2, 311), torch.empty(1, 311), torch.empty(0, 311)]
    assert bernoulli.can_pass_over(parts) is bernoulli.can_compare(parts[0], p)
    for before, after in ((0, 0), (311, 622), (622, 0)):
        expected = torch.empty(before // 311 + 3 + after // 311, 311)
        expected.bernoulli_(p, generator=theirs)
        bernoulli.draw_ones(parts, before, after, p, ours)
        assert torch.equal(torch.cat(parts), expected[before // 311 :][:3])
        assert torch.equal(ours.get_state(), theirs.get_state())


@components.needs("C++")
@pytest.mark.parametrize("place", [0, 310, 311, 312])
def test_the_last_bit_of_a_number_counts(place: int) -> None:
    """After one word has been drawn, those of number 311 are of two rounds."""

    def generator() -> torch.Generator:
        made = torch.Generator().manual_seed(3)
        torch.rand(1, generator=made)
        return made

    out = torch.empty(400)
    bits = int(bernoulli.draw_bits(out.long(), generator())[place]) % 2**53
    for is_less in (0, 1):
        p = (bits + is_less) / 2**53
        assert bernoulli.can_pass_over([out]) is bernoulli.can_compare(out, p)
        bernoulli.draw_ones([out], 0, 0, p, generator())
        assert out[place] == is_less


def test_other_tensors_are_compared_as_a_whole() -> None:
    for out in (torch.empty(2, 3).t(), torch.empty(2, dtype=torch.float64)):
        assert not bernoulli.can_pass_over([out])


def test_another_generators_state_is_refused() -> None:
    compiled = pytest.importorskip("instep.training.draws._mersenne_twister")
    state = torch.Generator().get_state()
    state[8:12] = 255
    with pytest.raises(ValueError, match="no state of torch's generator"):
        compiled.draw_ones(state.data_ptr(), 1, 0, 0, 0)
