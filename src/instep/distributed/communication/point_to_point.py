"""Tensors from one rank to another: send and recv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.exchanges import Shape, anchor, wants_gradient
from instep.distributed.communication.groups import Group
from instep.distributed.communication.tensors import (
    apply,
    as_bytes,
    check_reachable,
    current_device,
)
from instep.distributed.communication.transport import Transport, group_rank, transport
from instep.errors import CollectiveError


def send(tensor: Tensor, to: int, *, group: Group | None = None) -> Tensor:
    """Send `tensor` to another rank, which calls `recv`; returns when it may be changed again.

    Args:
        tensor: any shape and dtype, which travel with it.
        to: the rank that receives. Two ranks that both send first wait for each other; use
            all_to_all to exchange.
        group: the ranks among which they talk; all by default.

    Returns:
        A tensor without elements that stands for the sent one in this rank's loss: add its sum()
        to the loss, and backward receives the gradient that `to` sends back; create_graph=True
        raises.

    Raises ValueError for a rank that does not exist or is this one, WrongDeviceError,
    UnsuitableTensorError, NotAMemberError.
    """
    check_reachable(tensor)
    way, place = transport(group), _peer(to, group)
    way.send_object(
        (tuple(tensor.shape), tensor.dtype, tensor.device.type, wants_gradient(tensor)), place
    )
    token: Tensor = apply(_Send, tensor, way, place)
    return token


def recv(source: int, *, group: Group | None = None) -> Tensor:
    """The tensor that rank `source` sends here, with its shape and dtype.

    It requires a gradient if the sent one does; backward then sends the gradient to `source`, and
    must be run: torch.autograd.grad of other `inputs` does not send it, so that `source` waits in
    vain, and the job ends with an error that names the lines. On this rank's own GPU if it was on
    a GPU. create_graph=True raises.

    Raises ValueError for a rank that does not exist or is this one, NotAMemberError.
    """
    way, place = transport(group), _peer(source, group)
    shape, dtype, device, wanted = way.receive_object(place)
    nothing = torch.empty(0, dtype=dtype, device=current_device(device))
    received: Tensor = apply(_Receive, anchor(wanted), nothing, shape, way, place)
    return received


def _peer(rank: int, group: Group | None) -> int:
    place = group_rank(rank, "rank", group)
    if place == transport(group).rank:
        raise ValueError(f"rank {rank} is this rank itself; send and recv take another one.")
    return place


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, way: Transport, to: int) -> Tensor:
        ctx.shape, ctx.way, ctx.to = tensor.shape, way, to
        way.send(as_bytes(tensor), to)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        _refuse_second_derivative()
        return _received(grad, ctx.shape, ctx.way, ctx.to), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, like: Tensor, shape: Shape, way: Transport, source: int
    ) -> Tensor:
        ctx.way, ctx.source = way, source
        return _received(like, shape, way, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        (grad,) = grads
        _refuse_second_derivative()
        ctx.way.send(as_bytes(grad), ctx.source)
        return None, None, None, None, None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise CollectiveError(
            "send and recv have no second derivative; use all_to_all with create_graph=True."
        )


def _received(like: Tensor, shape: Shape, way: Transport, source: int) -> Tensor:
    """What `source` sends: of this shape, else like `like`."""
    tensor = like.new_empty(shape)
    way.receive(as_bytes(tensor), source)
    return tensor
