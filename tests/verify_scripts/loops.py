"""Training loops of other shapes: `loops.py KIND`."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import instep

KIND = sys.argv[1]


def two_models(loader):
    """Adversaries, each with an optimizer of its own; one sees what the other makes."""
    critic = instep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    maker = instep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    of_critic = torch.optim.Adam(critic.parameters(), 1e-3)
    of_maker = torch.optim.Adam(maker.parameters(), 1e-3)
    for x, _ in loader:
        made = maker(x)
        of_critic.zero_grad()
        (critic(made.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_maker.zero_grad()
        (-critic(made).mean()).backward()
        of_maker.step()


def one_model(loader):
    """Accumulation, clipping or mixed precision."""
    model = instep.replicate(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for k, (x, y) in enumerate(loader):
        if KIND == "accumulate" and k % 2 == 0:
            with instep.no_sync():
                (cross_entropy(model(x), y) / 2).backward()
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled=KIND == "autocast"):
            loss = cross_entropy(model(x), y) / (2 if KIND == "accumulate" else 1)
        loss.backward()
        if KIND == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


torch.manual_seed(0)
data = TensorDataset(torch.randn(61, 6), torch.randint(0, 3, (61,)))
batches = instep.shard(DataLoader(data, 8, shuffle=True))
two_models(batches) if KIND == "two_models" else one_model(batches)
