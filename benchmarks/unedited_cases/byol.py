"""lucidrains/byol-pytorch: the loss between an online and a target network."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def mlp(a, b):
    return nn.Sequential(
        nn.Linear(a, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, b)
    )


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.predictor, self.target = mlp(128, 64), mlp(64, 64), None

    def forward(self, x):
        one, two = x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)
        predicted = self.predictor(self.online(torch.cat([one, two])))
        with torch.no_grad():
            self.target = self.target or copy.deepcopy(self.online)
            goal = self.target(torch.cat([two, one]))
        return (2 - 2 * F.cosine_similarity(predicted, goal)).mean()

    def update(self):
        for old, new in zip(self.target.parameters(), self.online.parameters()):
            old.data = old.data * 0.99 + new.data * 0.01


learner = BYOL()
optimizer = torch.optim.Adam(learner.parameters(), lr=3e-4)
for step in range(20):
    loss = learner(torch.randn(64, 128))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learner.update()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
