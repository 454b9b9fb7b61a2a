"""Tensors from one rank to another: send and recv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.exchanges import Shape, graph_anchor, needs_gradient
from instep.distributed.communication.groups import Group
from instep.distributed.communication.tensors import (
    apply,
    as_message,
    check_reachable,
)
from instep.distributed.communication.transport import Transport, get_transport, group_rank
from instep.distributed.identity.torch_devices import current_device
from instep.errors import CollectiveError


def send(tensor: Tensor, to: int, *, group: Group | None = None) -> Tensor:
    """Send `tensor` to another rank, which calls `recv`; returns when it may be changed again.

    Args:
        tensor: any shape and dtype, which travel with it.
        to: the rank that receives. Two ranks that both send first deadlock; use
            all_to_all to exchange.
        group: a group of both ranks; the world by default.

    Returns:
        A tensor without elements that stands for the sent one in this rank's loss: add its sum()
        to the loss, and backward receives the gradient that `to` sends back; create_graph=True
        raises.

    Raises ValueError for a rank that does not exist or is this one, WrongDeviceError,
    UnsuitableTensorError, NotAMemberError.
    """
    check_reachable(tensor)
    transport, peer = get_transport(group), _peer_rank(to, group)
    transport.send_object(
        (tuple(tensor.shape), tensor.dtype, tensor.device.type, needs_gradient(tensor)), peer
    )
    token: Tensor = apply(_Send, tensor, transport, peer)
    return token


def recv(source: int, *, group: Group | None = None) -> Tensor:
    """The tensor that rank `source` sends here, with its shape and dtype.

    It is on this rank's own accelerator if the sent one is on one. It requires a gradient if the
    sent one does; backward then sends the gradient to `source`, and must be run:
    torch.autograd.grad of other `inputs` does not send it, so that `source` would wait for ever,
    and the job ends with an error that names the lines. create_graph=True raises.

    Raises ValueError for a rank that does not exist or is this one, NotAMemberError.
    """
    transport, peer = get_transport(group), _peer_rank(source, group)
    shape, dtype, device, needs_grad = transport.recv_object(peer)
    empty = torch.empty(0, dtype=dtype, device=current_device(device))
    received: Tensor = apply(_Recv, graph_anchor(needs_grad), empty, shape, transport, peer)
    return received


def _peer_rank(rank: int, group: Group | None) -> int:
    peer = group_rank(rank, "rank", group)
    if peer == get_transport(group).rank:
        raise ValueError(f"rank {rank} is this rank itself; send and recv take another one.")
    return peer


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, transport: Transport, to: int) -> Tensor:
        ctx.shape, ctx.transport, ctx.to = tensor.shape, transport, to
        transport.send(as_message(tensor), to)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        _refuse_second_derivative()
        return _recv_tensor(grad, ctx.shape, ctx.transport, ctx.to), None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, like: Tensor, shape: Shape, transport: Transport, source: int
    ) -> Tensor:
        ctx.transport, ctx.source = transport, source
        return _recv_tensor(like, shape, transport, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        (grad,) = grads
        _refuse_second_derivative()
        ctx.transport.send(as_message(grad), ctx.source)
        return None, None, None, None, None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise CollectiveError(
            "send and recv have no second derivative; use all_to_all with create_graph=True."
        )


def _recv_tensor(like: Tensor, shape: Shape, transport: Transport, source: int) -> Tensor:
    """Receive a tensor of this shape, with the dtype and device of `like`."""
    tensor = like.new_empty(shape)
    transport.recv(as_message(tensor), source)
    return tensor
