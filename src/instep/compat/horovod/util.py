"""`horovod.common.util`, and `env` and `codec` of `horovod.runner.common.util`: helpers that
scripts import."""

from __future__ import annotations

import base64
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import cloudpickle
import torch

from instep.compat.horovod import basics
from instep.compat.horovod.ops import ReduceOp, parse_op
from instep.distributed.rendezvous import bootstrap

T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
"""The frameworks for which Horovod has an extension; instep has torch's."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is an interface for a framework: "torch"."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError unless `ext_name` is "horovod.torch"."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"instep has no {ext_name}; it has horovod.torch only.", name=ext_name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether tensors of a framework may be on a GPU."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """False."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """True."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as one number; 0 without CUDA."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """False."""
    return basics.mpi_built()


ccl_built = ddl_built


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Inside, these environment variables are set; None leaves one as it is."""
    changes = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], ReduceOp]:
    """A function of `op` and `average` that gives the reduction; Average by default.

    It raises ValueError if both are given.
    """

    def choose(op: int | None, average: bool | None) -> ReduceOp:
        if average is not None and op is None:
            warnings.warn("`average` is now `op`.", DeprecationWarning, stacklevel=2)
        return parse_op(op, average)

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 (Horovod's)
    """`n` parts in order, of which the first ones are longer by one where `n` does not divide."""
    short, longer = divmod(len(l), n)
    ends = [k * short + min(k, longer) for k in range(n + 1)]
    return [l[start:end] for start, end in pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Whether `iter(x)` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank and the number of ranks, by the variables of any launcher; (0, 1) without one."""
    world = bootstrap.current()
    return world.rank, world.size


def dumps_base64(obj: object, to_ascii: bool = True) -> str | bytes:
    """A pickle of any object, functions too, in base64."""
    encoded = base64.b64encode(cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return encoded.decode() if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object of `dumps_base64`. Only of what is trusted: unpickling runs code."""
    return cloudpickle.loads(base64.b64decode(encoded))
