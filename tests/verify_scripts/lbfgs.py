"""One outer step of LBFGS in float64 on a batch divided by hand."""

import torch
from torch import nn

import instep

torch.manual_seed(0)
x = torch.randn(31, 5, dtype=torch.float64)
y = x.sin().sum(1, keepdim=True)
model = instep.replicate(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)).double())
x, y = instep.shard((x, y))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    # every rank has to see the same value, or its line search decides by itself
    block = instep.Mean()
    block.update(loss, len(x))
    whole = block.compute()
    return loss + (whole - loss.detach())


optimizer.step(closure)
