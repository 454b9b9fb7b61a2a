"""A model in FullyShardedDataParallel: every rank must take part in its state dict."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def save(model, path):
    torch.save(model.state_dict(), path)


def train(net, rank):
    model = FSDP(net)
    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    if rank == 0:
        save(model, "last.pt")
        torch.save(net.state_dict(), "net.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        state = model.state_dict()
        if rank == 0:
            torch.save(model.state_dict(), "best.pt")
    if dist.get_rank() != 0:
        return
    torch.save(state, "good.pt")
    torch.save(get_model_state_dict(model), "new.pt")
