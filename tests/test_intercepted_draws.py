"""Operations that draw random numbers, and functions in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from instep.training.draws import kernels, operations
from instep.training.draws.kernels import intercepted_draws

HALF = torch.full((6,), 0.5)
DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "rand_like": lambda: torch.rand_like(HALF),
    "randn": lambda: torch.randn(2, 3),
    "randint": lambda: torch.randint(9, (4,)),
    "randperm": lambda: torch.randperm(7),
    "randperm into a tensor": lambda: torch.randperm(7, out=torch.empty(7, dtype=torch.int64)),
    "normal": lambda: torch.normal(HALF, 2.0),
    "normal of two tensors": lambda: torch.normal(HALF, HALF),
    "normal of a size": lambda: torch.normal(0.0, 1.0, (3,)),
    "bernoulli": lambda: torch.bernoulli(HALF),
    "multinomial": lambda: torch.multinomial(HALF, 2),
    "poisson": lambda: torch.poisson(HALF),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "geometric_": lambda: torch.empty(3).geometric_(0.5),
    "random_": lambda: torch.empty(3).random_(5),
    "dropout": lambda: F.dropout(HALF, 0.5),
    "rrelu": lambda: F.rrelu(-HALF, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(HALF),
    "attention": lambda: F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4), dropout_p=0.5),
    "a gamma distribution": lambda: torch.distributions.Gamma(HALF, HALF).sample(),
    "a binomial distribution": lambda: torch.distributions.Binomial(4, HALF).sample(),
    "layers that begin": lambda: nn.Linear(2, 2).weight,
}


class Seen:
    """Runs draws as they are, and notes their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_draws_is_intercepted_and_draws_the_same(draw: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    expected, state = draw(), torch.get_rng_state()
    seen = Seen()
    torch.manual_seed(3)
    with intercepted_draws(seen):
        found = draw()
    assert seen.names
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)
    with intercepted_draws(lambda *_: pytest.fail("drawn")), pytest.raises(pytest.fail.Exception):
        draw()


def test_nothing_else_is() -> None:
    q = torch.randn(3, 1, 2, 4, requires_grad=True)
    with intercepted_draws(lambda *_: pytest.fail("drawn")):
        F.scaled_dot_product_attention(*q).sum().backward()
        F.dropout(HALF, 0.5, training=False)
    assert q.grad is not None


def test_what_a_function_in_its_place_returns_is_the_result() -> None:
    def ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        first: Tensor = args[0] if isinstance(args[0], Tensor) else torch.arange(args[0])
        return first.fill_(1)

    x = torch.full((2, 3), 5.0, requires_grad=True)
    with intercepted_draws(ones):
        assert torch.equal(torch.rand(3), torch.ones(3))
        assert torch.equal(torch.randperm(3), torch.ones(3, dtype=torch.int64))
        kept = F.dropout(x, 0.75)
    kept.sum().backward()
    assert torch.equal(kept, 4 * x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 4.0))


def test_it_is_of_one_thread_and_ends_where_an_error_leaves_it() -> None:
    seen, others = Seen(), Seen()
    with intercepted_draws(seen):
        thread = threading.Thread(target=torch.rand, args=(2,))
        thread.start()
        thread.join()
        assert not seen.names
        with pytest.raises(ZeroDivisionError), intercepted_draws(others):
            raise ZeroDivisionError
        torch.rand(2)
    torch.rand(2)
    assert not others.names
    assert len(seen.names) == 1


def test_an_error_of_a_function_in_its_place_is_the_scripts() -> None:
    def fail(*_: Any) -> None:
        raise LookupError("no rows")

    with intercepted_draws(fail):
        for _ in range(2):
            with pytest.raises(LookupError, match="no rows"):
                torch.rand(2)


def test_torch_has_its_kernels_back_when_no_draw_is_intercepted_any_more() -> None:
    seen = Seen()
    with intercepted_draws(seen):
        torch.rand(2)
    assert kernels._replaced.library
    kernels.release_if_idle()
    assert kernels._replaced.library  # it was used until now
    kernels.release_if_idle()
    assert not kernels._replaced.library
    torch.manual_seed(3)
    expected = torch.multinomial(HALF, 2)
    with intercepted_draws(seen):
        torch.manual_seed(3)
        assert torch.equal(torch.multinomial(HALF, 2), expected)
    assert len(seen.names) == 2


def test_the_table_has_every_operation_that_draws_on_cpus() -> None:
    """Attention that has a kernel of its own on CPUs has no dropout."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, own = name.partition("::")
        if namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            continue
        packet, _, overload = own.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch.Tag.nondeterministic_seeded in func.tags:
            found.add(own)
    of_attention = {"_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
    assert found - of_attention == set(operations.DRAWS_ON_CPUS)
